"""Ridge regression in closed form, with its penalty chosen by cross-validation over families."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FOLDS = 3
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # for cross-validation


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return w (..., F, O), least squares of x w - y plus penalty times w's, for x (..., N, F) and y (..., N, O).

    The penalty is in units of the mean square of a feature. Solved in the smaller of the primal (F equations) and the
    dual form (N equations), in float64.
    """
    x, y = x.double(), y.double()
    if x.size(-1) <= x.size(-2):
        return solve(x.mT @ x, x.mT @ y, penalty)
    gram = x @ x.mT  # its trace, over F, is that of the primal form
    return x.mT @ solve(gram, y, penalty * x.size(-2) / x.size(-1))


def solve(a: Tensor, b: Tensor, penalty: float) -> Tensor:
    """Solve (a + penalty * mean(diagonal of a) * I) w = b for positive semidefinite a (..., n, n)."""
    scale = a.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=1e-30)
    return torch.linalg.solve(
        a + penalty * scale * torch.eye(a.size(-1), dtype=a.dtype, device=a.device), b
    )


def cross_validate(
    error: Callable[[Tensor, Tensor, float], float],
    groups: Sequence[object],
    penalties: Sequence[float] = PENALTIES,
) -> float:
    """Return the penalty with the least mean error(train, test, penalty) over FOLDS parts of whole groups; train and
    test are indices. A paraphrase in the training part would give the answer away: hence groups. The draw is fixed."""
    names = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    if len(names) < FOLDS:
        raise ValueError(f"cross-validation needs {FOLDS} families of prompts, got {len(names)}")
    shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    fold = shuffled[torch.tensor([names[group] for group in groups])] % FOLDS
    parts = [((fold != i).nonzero()[:, 0], (fold == i).nonzero()[:, 0]) for i in range(FOLDS)]
    return min(penalties, key=lambda penalty: sum(error(*part, penalty) for part in parts))

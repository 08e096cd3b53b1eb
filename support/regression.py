"""Ridge regression in closed form, with its penalty chosen by cross-validation over families."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FOLDS = 3
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)  # for cross-validation


def ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Return the w (..., F, O) that minimises |x w - y|^2 + penalty * s * |w|^2 for x (..., N, F)
    and y (..., N, O).

    s is the sum of the squares of a feature, as a mean over features. Solved in the smaller of the
    primal (F equations) and the dual form (N equations), in float64.
    """
    x, y = x.double(), y.double()
    if x.size(-1) <= x.size(-2):
        return solve_penalised(x.mT @ x, x.mT @ y, penalty)
    gram = x @ x.mT  # its trace is that of the primal form's x.mT @ x
    return x.mT @ solve_penalised(gram, y, penalty * x.size(-2) / x.size(-1))


def solve_penalised(matrix: Tensor, target: Tensor, penalty: float) -> Tensor:
    """Solve (matrix + penalty * mean(diagonal) * I) w = target for a positive semidefinite matrix (..., n, n)."""
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=1e-30)
    identity = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve(matrix + penalty * scale * identity, target)


def cross_validate(
    error: Callable[[Tensor, Tensor, float], float],
    groups: Sequence[object],
    penalties: Sequence[float] = PENALTIES,
) -> float:
    """Return the penalty with the least sum of error(train, test, penalty) over FOLDS folds; train
    and test are indices.

    A group is held out as a whole, since a paraphrase in the training part would give the answer
    away. The folds are the same every time. Where there is one penalty, nothing is fitted. Raises
    ValueError if there are fewer groups than folds.
    """
    names = [*dict.fromkeys(groups)]
    if len(names) < FOLDS:
        raise ValueError(f"cross-validation needs {FOLDS} families of prompts, got {len(names)}")
    if len(penalties) == 1:
        return penalties[0]
    shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    fold_of = dict(zip(names, shuffled % FOLDS, strict=True))
    folds = torch.stack([fold_of[group] for group in groups])
    splits = [(torch.where(folds != i)[0], torch.where(folds == i)[0]) for i in range(FOLDS)]

    def total_error(penalty: float) -> float:
        return sum(error(train, test, penalty) for train, test in splits)

    return min(penalties, key=total_error)

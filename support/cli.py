"""The command line that all scripts share: model, device, dtype, seed, and errors in one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tiktoken
import torch
from torch import Tensor

if TYPE_CHECKING:
    from support.tracing import Trace

PROMPT = "Everyone in Tolben knew Halek and his sister Belessa."


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


class CommandLine(argparse.ArgumentParser):
    """What the command lines of all scripts share: model, device, dtype, seed, and errors in one sentence."""

    def __init__(self, doc: str | None, example: str, models: str = "") -> None:
        """doc: its first line describes the script; models: the names that --model takes."""
        super().__init__(description=" ".join((doc or "").partition("\n\n")[0].split()), epilog=f"example: {example}",
                         formatter_class=HelpFormatter)
        self.models = models

    def add_model_arguments(self, model: str = "--model") -> None:
        """Add which model runs (args.model), where and in which numbers; a name without dashes makes it positional."""
        optional = {"dest": "model"} if model.startswith("-") else {"nargs": "?"}
        self.add_argument(model, default="pocket", metavar="NAME", help=self.models, **optional)
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"),
                          help="where to compute; auto: cuda if there is one, else mps, else cpu")
        self.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
                          help="number format of weights and activations")
        self.add_argument("--threads", type=whole_number(1), metavar="N",
                          help="CPU threads; default: 1 for the small pocket models, else PyTorch's choice")
        self.add_argument("--seed", default=0, type=whole_number(0, 2**32 - 1), metavar="N", help="of random draws")

    def add_generation_arguments(self) -> None:
        """Add what the scripts that write text have in common."""
        self.add_model_arguments()
        self.add_argument("--prompt", default=PROMPT, type=nonempty, metavar="TEXT", help="text to continue")
        self.add_argument("--max-new-tokens", default=250, type=whole_number(1), metavar="N", help="tokens to write")
        self.add_argument("--temperature", default=0.0, type=temperature, metavar="X",
                          help="0: always the likeliest token; higher: more random")
        self.add_argument("--top-k", type=whole_number(1), metavar="N", help="draw among the N likeliest tokens only")
        self.add_trace_argument()

    def add_trace_argument(self, prefix: str = "") -> None:
        """Add --trace (args.trace_file); prefix: of its help."""
        self.add_argument("--trace", dest="trace_file", metavar="FILE.html",
                          help=f"{prefix}also write a page that plays the generation step by step, in any browser")

    def trace(self, args: argparse.Namespace, tokenizer: tiktoken.Encoding, model: Any, ids: Tensor,
              context_start: Callable[[int, int], int] | None = None) -> Trace | None:
        """Return what records a text that begins with ids (1, T), None without --trace. context_start(tokens, n_ctx)
        says where the context begins in a text that is read without a cache."""
        if (path := self.trace_path(args)) is None:
            return None
        from support.tracing import Trace

        trace = Trace(f"{self.prog} {' '.join(sys.argv[1:])}", tokenizer, model.config.n_ctx, path, context_start)
        trace.begin(ids[0].tolist())
        return trace

    def trace_path(self, args: argparse.Namespace) -> Path | None:
        """Return the file that --trace names, None without it. Raises ValueError, before anything is written, if there
        can be no such file."""
        if args.trace_file is None:
            return None
        path = Path(args.trace_file)
        if path.is_dir():
            raise ValueError(f"--trace {path} is a folder, and must be a file")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"--trace {path}: there is no folder {path.parent} that can be written to")
        return path

    @contextmanager
    def parse(self, argv: list[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments, device and dtype resolved and the seed set; ValueError and OSError in the body, the
        project's ways to say that an input is bad, become one sentence and exit status 2."""
        args = self.parse_args(argv)
        if "device" in args:
            present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
            if args.device == "auto":
                args.device = next(device for device in present if present[device])
            if not present[args.device]:
                self.error(f"--device {args.device}: there is none that this PyTorch can use; try --device cpu")
            args.dtype = getattr(torch, args.dtype)
            torch.set_num_threads(args.threads or (1 if args.model.startswith("pocket") else torch.get_num_threads()))
            torch.manual_seed(args.seed)
        try:
            yield args
            sys.stdout.flush()  # if the reader of a pipe has left, it shows here
        except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not fail at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.exit(0)
        except (ValueError, OSError) as error:
            missing = isinstance(error, FileNotFoundError) and error.filename
            self.error(f"there is no {missing}" if missing else " ".join(str(error).split()))
        except KeyboardInterrupt:
            self.exit(130, "\n")

    def error(self, message: str) -> NoReturn:
        """Print one sentence, and end with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return an argument type: whole numbers from low to high."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            most = "" if high is None else f" and at most {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}{most}, got {text!r}")
        return value

    return convert


def temperature(text: str) -> float:
    """Argument type: 0, or a finite number that one can divide by."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value == 0 or 1e-6 <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"must be 0, or a number of at least 1e-6, got {text!r}")
    return value


def nonempty(text: str) -> str:
    """Argument type: text that isn't empty, since a model needs a token to begin with."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, but the model needs at least one token to begin with")
    return text

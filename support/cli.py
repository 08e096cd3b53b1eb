"""The command line that all scripts share: model, device, dtype, seed, and errors in one sentence."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import tiktoken
import torch
from torch import Tensor

from support.files import import_file

if TYPE_CHECKING:
    from support.tracing import Trace

PROMPT = "One morning"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or isinstance(action.default, type)
        return action.help if silent else super()._get_help_string(action)


class CommandLine(argparse.ArgumentParser):
    """The common part of all command lines: model, device, dtype, seed, and errors in one sentence."""

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
                          help="where to compute; auto: cuda if available, else mps, else cpu")
        self.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"),
                          help="number format of weights and activations")
        self.add_argument("--threads", type=whole_number(1, 1024), metavar="N",
                          help="CPU threads; default: 1 for the small pocket models, else PyTorch's choice")
        self.add_argument("--seed", default=0, type=whole_number(0, 2**32 - 1), metavar="N", help="for random draws")

    def add_generation_arguments(self, model: str = "--model", trace: bool = True) -> None:
        """Add the common options of scripts that write text; model: the option that names the model."""
        self.add_model_arguments(model)
        self.add_argument("--prompt", default=PROMPT, type=nonempty, metavar="TEXT", help="text to continue")
        self.add_argument("--max-new-tokens", default=250, type=whole_number(1), metavar="N", help="tokens to write")
        self.add_argument("--temperature", default=0.0, type=temperature, metavar="X",
                          help="0: always the likeliest token; higher: more random")
        self.add_argument("--top-k", type=whole_number(1), metavar="N", help="sample from the N likeliest tokens only")
        if trace:
            self.add_trace_argument()

    def add_cache_argument(self, default: type) -> None:
        """Add --cache (args.cache): a class, by default this one, or the class Cache of a Python file."""
        self.add_argument("--cache", default=default, type=cache_class, metavar="FILE.py",
                          help="use the class Cache of this file, such as chapters/02_kv_cache/exercise.py")

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
        trace.watch(model)
        return trace

    def trace_path(self, args: argparse.Namespace) -> Path | None:
        """Return the file that --trace names, None without it. Raises ValueError, before anything is written, if there
        can be no such file."""
        if args.trace_file is None:
            return None
        path = Path(args.trace_file)
        if path.is_dir():
            raise ValueError(f"--trace {path} is a folder, and must be a file")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(f"--trace {path}: there is no folder {path.parent} that can be written to")
        return path

    def only(self, action: str, owner: str, options: dict[str, Any]) -> None:
        """Raise ValueError if an option is given that an action doesn't have, but only the owner; or if the action is
        "study", which must be the first word."""
        if action == "study":
            raise ValueError("study comes first: see `study --help`")
        if action != owner and (given := [name for name, value in options.items() if value is not None]):
            raise ValueError(f"{action} has no {given[0]}: {owner} has")

    @contextmanager
    def parse(self, argv: list[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments, device and dtype resolved and the seed set; ValueError and OSError in the body, the
        project's ways to say that an input is bad, become one sentence and exit status 2, Ctrl-C exit status 130."""
        with self.one_sentence(), self.interruptible():
            sys.stdin, sys.stderr = sys.stdin or open(os.devnull), sys.stderr or open(os.devnull, "w")  # noqa: SIM115
            if sys.stdout is None:
                self.error("the standard output is closed; > /dev/null discards what is printed")
            if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without é shows \xe9
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                args = self.resolved(self.parse_args(argv))
                with warnings.catch_warnings():  # which puts showwarning back
                    warnings.showwarning = lambda message, *_: print(f"{self.prog}: {message}", file=sys.stderr)
                    yield args
            finally:
                self.flush()

    @contextmanager
    def one_sentence(self) -> Iterator[None]:
        """Errors that a bad input or a full disk makes in the body become one sentence and exit status 2."""
        try:
            yield
        except BrokenPipeError:  # `| head` has seen enough
            self.exit(0)
        except (ValueError, OSError) as error:
            file, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
            if reason and not file:  # the file, or standard output, was open already
                self.error(f"can't write the output: {reason}")
            missing = isinstance(error, FileNotFoundError) and file
            self.error(f"there is no {missing}" if missing else " ".join(str(error).split()))
        except NotImplementedError as error:  # of a chapter's exercise
            if not str(error).startswith("exercise "):
                raise
            self.error(f"{error} isn't written yet")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C in the body ends the process with status 130 after its clean-up; before and after it, and the second
        time, the signal itself does (support.interrupts has left it so)."""
        interrupted, hook = False, sys.unraisablehook

        def interrupt(*_: Any) -> None:
            nonlocal interrupted
            interrupted = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            raise KeyboardInterrupt

        def unraisable(error: Any) -> None:
            if isinstance(error.exc_value, KeyboardInterrupt):  # in a destructor, where Python would print it and go on
                os._exit(130)
            hook(error)

        ours = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        try:
            if ours:
                signal.signal(signal.SIGINT, interrupt)
                sys.unraisablehook = unraisable
            yield
        except BaseException as error:
            if interrupted or isinstance(error, KeyboardInterrupt):  # C code may have made another error of it
                self.exit(130, "\n")
            raise
        finally:
            if ours:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                sys.unraisablehook = hook

    def resolved(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return the arguments with device and dtype as PyTorch's, and set its threads and seed."""
        if "device" in args:
            present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
            if args.device == "auto":
                args.device = next(device for device in present if present[device])
            if not present[args.device]:
                raise ValueError(f"--device {args.device}: there is none that this PyTorch can use; try --device cpu")
            args.dtype = getattr(torch, args.dtype)
            torch.set_num_threads(args.threads or (1 if args.model.startswith("pocket") else torch.get_num_threads()))
            torch.manual_seed(args.seed)
        return args

    def print_help(self, file: IO[str] | None = None) -> None:
        """Print the help; argparse would keep quiet about an output that can't be written."""
        print(self.format_help(), end="", file=file)

    def flush(self) -> None:
        """Write what is left in the buffer of the standard output. Raises OSError if it can't be written."""
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
            raise

    def error(self, message: str) -> NoReturn:
        """Print one sentence, and end with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type: whole numbers from low to high, by default the largest that PyTorch takes anywhere."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            allowed = f"of at least {low} and at most {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
        return value

    return convert


def writable_folder(text: str) -> Path:
    """Argument type: a folder that can be written to, or a place where one can be made."""
    path = Path(text)
    there = next(above for above in (path, *path.absolute().parents) if above.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: {there} is not a folder that can be written to")
    return path


def cache_class(text: str) -> type:
    """Argument type: a Python file, as the class Cache in it."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    if path.suffix != ".py":
        raise argparse.ArgumentTypeError(f"{text} is not a Python file, its name must end in .py")
    try:
        found = getattr(import_file(path), "Cache", None)
    except SyntaxError as error:
        raise argparse.ArgumentTypeError(f"{text}, line {error.lineno}: {error.msg}") from error
    if not isinstance(found, type):
        raise argparse.ArgumentTypeError(f"{text} has no class Cache")
    return found


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
    """Argument type: text in UTF-8 that isn't empty, since a model needs a token to begin with."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, but the model needs at least one token to begin with")
    if any("\ud800" <= char <= "\udfff" for char in text):  # bytes that Python could not decode
        raise argparse.ArgumentTypeError("is not valid UTF-8")
    return text

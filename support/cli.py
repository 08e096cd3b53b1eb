"""What the scripts' command lines share: options that several of them take, and errors in one sentence."""

import argparse
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import torch

from support.files import import_file, lacks_memory, read_text, writable_folder, writable_target

# Control characters but line feed and tab, and what is printed instead.
CONTROL = {i: f"\\x{i:02x}" for i in (*range(9), *range(11, 32), *range(127, 160))}
LONGEST_ERROR = 1000  # characters


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default and not isinstance(action.default, type):
            return super()._get_help_string(action)
        return action.help


class ShownOutput:
    """A standard output that shows control characters by number: a terminal doesn't obey the escape
    sequences in a stranger's tokens, templates and names."""

    def __init__(self, output: TextIO) -> None:
        self.output = output

    def write(self, text: str) -> int:
        return self.output.write(text.translate(CONTROL))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.output, name)


class CommandLine(argparse.ArgumentParser):
    """A parser whose arguments are used in `with cli.parse() as args`: there, a bad input ends the
    script with one sentence."""

    default_action = ""  # what a command line without an action means

    def __init__(self, doc: str, example: str = "", **options: Any) -> None:
        """doc: a docstring whose first paragraph describes the script; example: a command line that
        --help shows."""
        super().__init__(
            description=doc.partition("\n\n")[0],
            epilog=example and f"example: {example}",
            formatter_class=HelpFormatter,
            **options,
        )

    def add_actions(self, default: str, **abouts: str) -> "list[CommandLine]":
        """Add actions by name (subcommands; args.action is the name), with what they do, and return
        their parsers. default: the one that a bare run means, or ""."""
        self.default_action = default
        about = f"default: {default or 'none'}; ACTION --help shows its options"
        actions = self.add_subparsers(dest="action", metavar="ACTION", required=True, help=about)
        return [actions.add_parser(name, help=text, doc=text) for name, text in abouts.items()]

    def add_options(self, *names: str, **changes: Any) -> None:
        """Add some of OPTIONS, with changes; beside --prompt, the option that reads it from a file."""
        for name in names:
            place = self.add_mutually_exclusive_group() if name == "--prompt" else self
            place.add_argument(name, **OPTIONS[name] | changes)
            if name == "--prompt":
                place.add_argument("--prompt-file", **OPTIONS["--prompt-file"])

    def add_model_options(self, models: str, *more: str, option: str = "--model") -> None:
        """Add the option that names the model (args.model), those of DEVICE, and more of OPTIONS.
        models: what may be named."""
        self.add_argument(option, dest="model", default="pocket", metavar="NAME", help=models)
        self.add_options(*DEVICE, *more)

    @contextmanager
    def parse(self, argv: list[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments, with device and dtype resolved and the seed set.

        ValueError and OSError in the body mean that an input is bad, or a disk full: they become one
        sentence and exit status 2, and so does too little memory. Ctrl-C becomes exit status 130.
        Both happen after the body has cleaned up.
        """
        try:
            if hasattr(sys.stdout, "reconfigure"):  # a terminal without é shows \xe9
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                args = self.parsed(sys.argv[1:] if argv is None else argv)
                with warnings.catch_warnings(), redirect_stdout(ShownOutput(sys.stdout)):
                    warnings.showwarning = lambda message, *_: print(
                        f"{self.prog}: {message}".translate(CONTROL), file=sys.stderr
                    )
                    self.prepare(args)
                    yield args
            finally:
                flush_output()
        except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
            self.exit(0)
        except KeyboardInterrupt:
            self.exit(130, "\n")
        except NotImplementedError as error:
            if not str(error).startswith("exercise "):
                raise
            self.error(f"{error} isn't written yet")
        except (ValueError, OSError) as error:
            self.error(str(error))
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            self.error(f"there is too little memory: {error}")

    def parsed(self, words: list[str]) -> argparse.Namespace:
        """Return the arguments in the words of a command line."""
        if "" in words:
            self.error("a word of the command line is empty")
        first = words[0] if words else "-"
        if self.default_action and first.startswith("-") and first not in ("-h", "--help"):
            words = [self.default_action, *words]
        return self.parse_args(words)

    def prepare(self, args: argparse.Namespace) -> None:
        """Set device, dtype, threads and seed for PyTorch, and choose defaults by the model."""
        if getattr(args, "top_k", None) and args.temperature == 0:
            raise ValueError(
                "--top-k has no effect at temperature 0: add --temperature, such as 0.8"
            )
        if "device" not in args:
            return
        args.device = device_of(args.device)
        if args.dtype != "auto":  # which load_model() resolves
            args.dtype = getattr(torch, args.dtype)
        is_pocket = args.model.startswith("pocket")
        if args.threads or is_pocket:
            torch.set_num_threads(args.threads or 1)
        torch.manual_seed(args.seed)
        for name, value in vars(args).items():
            if isinstance(value, ByModel):
                setattr(args, name, value.pocket if is_pocket else value.larger)

    def error(self, message: str) -> NoReturn:
        """Print one sentence, and end with status 2."""
        sentence = " ".join(message.split()).translate(CONTROL)
        if len(sentence) > LONGEST_ERROR:
            sentence = f"{sentence[:LONGEST_ERROR]}..."
        self.exit(2, f"{self.prog}: {sentence}\n")


def flush_output() -> None:
    """Write the standard output's buffer. Raises OSError if it can't be written."""
    try:
        sys.stdout.flush()
    except OSError:  # keeps Python from writing it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def device_of(name: str) -> str:
    """Return the device that --device names; "auto" is a GPU if there is one, else the CPU. Raises
    ValueError if PyTorch can't find the device."""
    fastest = str(torch.accelerator.current_accelerator(check_available=True))
    if fastest not in ("cuda", "mps"):
        fastest = "cpu"
    if name not in ("auto", "cpu", fastest):
        raise ValueError(f"--device {name}: PyTorch finds none; try --device cpu")
    return fastest if name == "auto" else name


def study_command(study: str, model: str, option: str = "--model") -> str:
    """Return the command that runs a study with a model, which `option` names if it isn't pocket."""
    command = f"python3 -m studies.{study}"
    return command if model == "pocket" else f"{command} {option} {model}"


# --- Options and their types ----------------------------------------------------------------------


class ByModel(NamedTuple):
    """A default for pocket's models, and one for others, which take longer."""

    pocket: int
    larger: int

    def __str__(self) -> str:
        return f"{self.pocket}, by models that aren't pocket's {self.larger}"


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type: whole numbers from low to high, by default the largest that all of
    PyTorch accepts."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {low} and at most {high}, got {text!r}"
            )
        return int(text)

    return convert


def temperature(text: str) -> float:
    """Argument type: 0, or a finite number that logits can be divided by."""
    value = float(text)
    if value != 0 and not 1e-6 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0, or at least 1e-6 and finite, got {text}")
    return value


def output_file(text: str) -> Path:
    """Argument type: a file that can be written, in a folder that exists or can be made."""
    path = Path(text)
    try:
        writable_folder(writable_target(path).parent)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def utf8(text: str) -> str:
    """Argument type: text without bytes that Python could not decode."""
    text.encode()
    return text


def prompt_file(text: str) -> str:
    """Argument type: a file of text, or - for the standard input; the value is the text in it, without the end of its
    last line."""
    try:
        prompt = sys.stdin.read() if text == "-" else read_text(Path(text))
        if not prompt.strip():
            raise ValueError(f"{text} holds no text")
        return utf8(prompt.removesuffix("\n"))
    except UnicodeError as error:
        raise argparse.ArgumentTypeError("the standard input is not a text in UTF-8") from error
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def cache_class(text: str) -> type:
    """Argument type: a Python file, which is run; the value is its class Cache."""
    path = Path(text).resolve()
    try:
        cache = import_file(path).Cache
        cache()  # as each text will
    except (Exception, SystemExit) as error:
        place = text
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                place = f"{text}, line {frame.lineno}"
        cause = f"{place}: {type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(cause) from error
    return cache


# The options that several scripts take, by name: the arguments of add_argument().
OPTIONS = {
    "--device": {
        "default": "auto",
        "choices": ("auto", "cpu", "cuda", "mps"),
        "help": "where to compute; auto: a GPU if there is one",
    },
    "--dtype": {
        "default": "float32",
        "choices": ("float32", "float16", "bfloat16", "auto"),
        "help": "number format; auto: the files' own, where that is faster than float32",
    },
    "--threads": {
        "type": whole_number(1, 1024),
        "metavar": "N",
        "help": "CPU threads; default: 1 for pocket models, else PyTorch's choice",
    },
    "--seed": {
        "default": 0,
        "type": whole_number(0, 2**32 - 1),
        "metavar": "N",
        "help": "seed of random draws",
    },
    "--prompt": {
        "default": "One morning",
        "type": utf8,
        "metavar": "TEXT",
        "help": "text to continue",
    },
    "--prompt-file": {
        "dest": "prompt",
        "default": argparse.SUPPRESS,
        "type": prompt_file,
        "metavar": "FILE",
        "help": "file that holds the text to continue; -: the standard input",
    },
    "--max-new-tokens": {
        "default": 250,
        "type": whole_number(1),
        "metavar": "N",
        "help": "tokens to write",
    },
    "--temperature": {
        "default": 0.0,
        "type": temperature,
        "metavar": "X",
        "help": "0, the default: always the likeliest token; higher: more random",
    },
    "--top-k": {
        "type": whole_number(1),
        "metavar": "N",
        "help": "sample from the N likeliest tokens only",
    },
    "--cache": {
        "type": cache_class,
        "metavar": "FILE.py",
        "help": "run this file and use its class Cache, such as chapters/02_kv_cache/exercise.py",
    },
    "--chat": {
        "action": "store_true",
        "help": "the prompt is a question to an Instruct model: wrap it as the model's template says, or in Llama 3's "
        "headers or ChatML",
    },
    "--system": {
        "default": "",
        "type": utf8,
        "metavar": "TEXT",
        "help": "what an Instruct model is told before the conversation; default: what its form says",
    },
    "--student": {
        "metavar": "NAME",
        "help": "the model that decodes, or drafts; default: pocket-student for pocket, else NAME:int5, "
        "the teacher's twin with weights of 5 bits",
    },
    "--trace": {
        "type": output_file,
        "metavar": "FILE.html",
        "help": "also write a page that plays the text step by step",
    },
}
DEVICE = ("--device", "--dtype", "--threads", "--seed")
WRITING = ("--prompt", "--max-new-tokens", "--temperature", "--top-k")

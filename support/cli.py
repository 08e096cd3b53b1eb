"""The command line that all scripts share: model, device, dtype, seed, and errors in one sentence."""

import _thread
import argparse
import math
import os
import re
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import tiktoken
import torch
from torch import Tensor

from formats.chat import encode_question, question_form
from support.conditions import SIZES, is_geometry
from support.files import import_file, writable_target
from support.tracing import Trace

PROMPT = "One morning"
GEOMETRIES = f"{', '.join(SIZES)} or LAYERSxHEADSxWIDTH"
# Raschka's experiment with an untrained model.
ARTICLE = {"prompt": "Hello, I am", "max_new_tokens": 200}


MODEL_OPTIONS = ("--model", "--teacher", "--student")
# Options that one script takes and people try in another, and the script; for an action, with its name.
TAKEN_BY = {
    "--random": "gpt_kv_cache.py",
    "--compare": "gpt_kv_cache.py",
    "--cache": "gpt_kv_cache.py",
    "--prompt": "gpt_kv_cache.py",
    "--temperature": "gpt_kv_cache.py",
    "--top-k": "gpt_kv_cache.py",
    "--max-new-tokens": "gpt_kv_cache.py",
    "--trace": "gpt_kv_cache.py",
    "--chat": "llama_kv_cache.py",
    "--system": "llama_kv_cache.py",
    "--text": "compress.py demo",
    "--memory": "gpt_bounded_cache.py",
    "--slots": "gpt_bounded_cache.py",
    "--verify": "load_gpt2_weights.py",
    "--tokens": "compress.py demo",
    "--blocks": "paged.py serve",
    "--samples": "paged.py serve",
    "--policy": "overfill.py write",
    "--draft": "speculate.py write",
    "--by": "speculate.py write",
    "--store": "recycle.py chat",
    "--encoder": "recycle.py run",
}


def study_command(study: str, model: str, option: str = "--model") -> str:
    """Return the command that runs a study with a model, which `option` names if it isn't pocket."""
    command = f"python3 -m studies.{study}"
    return command if model == "pocket" else f"{command} {option} {model}"


class DefaultCount(int):
    """A default number of tokens, and the one for models that aren't pocket's, which take longer."""

    large: int

    def __new__(cls, small: int, large: int) -> "DefaultCount":
        count = super().__new__(cls, small)
        count.large = large
        return count


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that only mean "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, False, "") or isinstance(default, type):
            return action.help
        return super()._get_help_string(action)


class CommandLine(argparse.ArgumentParser):
    """The common part of all command lines: model, device, dtype, seed, and errors in one sentence."""

    def __init__(
        self, doc: str | None, example: str = "", models: str = "", **options: Any
    ) -> None:
        """doc: a docstring whose first paragraph describes the script; example: a command line that
        --help shows; models: the names that --model takes."""
        self.argument_names: set[str] = set()
        super().__init__(
            description=" ".join((doc or "").partition("\n\n")[0].split()),
            epilog=example and f"example: {example}",
            formatter_class=HelpFormatter,
            **options,
        )
        self.models = models
        self.actions: dict[str, CommandLine] = {}
        self.default_action = ""
        self.decided_late: dict[str, None] = {}  # arguments whose default depends on --random

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument as argparse does, and remember its names."""
        self.argument_names.update(names)
        return super().add_argument(*names, **options)

    def add_action(self, name: str, about: str, default: bool = False) -> "CommandLine":
        """Add an action (a subcommand; args.action is its name), and return the command line that
        takes its options. about: what it does; default: whether it runs if the command line names
        no action."""
        if not self.actions:
            self.subparsers = self.add_subparsers(
                title="actions",
                description=f"options of an action: {self.prog} ACTION --help",
                dest="action",
                metavar="ACTION",
                required=True,
                parser_class=CommandLine,
            )
        if default:
            self.default_action = name
        self.actions[name] = self.subparsers.add_parser(
            name,
            help=f"{about} (the default)" if default else about,
            doc=about,
            models=self.models,
        )
        return self.actions[name]

    def add_model_arguments(self, model: str = "--model") -> None:
        """Add the options for the model (args.model), device, dtype, threads and seed. model: the
        option that names the model; without dashes it is positional."""
        optional = {"dest": "model"} if model.startswith("-") else {"nargs": "?"}
        self.add_argument(model, default="pocket", metavar="NAME", help=self.models, **optional)
        self.add_argument(
            "--device",
            default="auto",
            choices=("auto", "cpu", "cuda", "mps"),
            help="where to compute; auto: a GPU if there is one",
        )
        self.add_argument(
            "--dtype",
            default="float32",
            choices=("float32", "float16", "bfloat16", "auto"),
            help="number format; auto: the files' own, where that is faster than float32",
        )
        self.add_argument(
            "--threads",
            type=whole_number(1, 1024),
            metavar="N",
            help="CPU threads; default: 1 for pocket models, else PyTorch's choice",
        )
        self.add_argument(
            "--seed",
            default=0,
            type=whole_number(0, 2**32 - 1),
            metavar="N",
            help="seed of random draws",
        )

    def add_length_argument(self, default: int = 250, about: str = "tokens to write") -> None:
        """Add --max-new-tokens. default: may be a DefaultCount."""
        if isinstance(default, DefaultCount):
            about += (
                f"; by models that aren't pocket's {default.large}, unless another number is given"
            )
        self.add_argument(
            "--max-new-tokens", default=default, type=whole_number(1), metavar="N", help=about
        )

    def add_sampling_arguments(self) -> None:
        """Add --temperature and --top-k."""
        self.add_argument(
            "--temperature",
            default=0.0,
            type=temperature,
            metavar="X",
            help="0, the default: always the likeliest token; higher: more random",
        )
        self.add_argument(
            "--top-k",
            type=whole_number(1),
            metavar="N",
            help="sample from the N likeliest tokens only",
        )

    def add_generation_arguments(self, model: str = "--model", trace: bool = True) -> None:
        """Add the common options of scripts that write text; model: the option that names the model."""
        self.add_model_arguments(model)
        self.add_argument(
            "--prompt", default=PROMPT, type=utf8, metavar="TEXT", help="text to continue"
        )
        self.add_length_argument()
        self.add_sampling_arguments()
        if trace:
            self.add_trace_argument()

    def add_random_argument(self) -> None:
        """Add --random, for an untrained GPT-2: args.model becomes "random:SIZE". By default the
        prompt and the length are then those of the KV cache article."""
        self.add_argument(
            "--random",
            type=geometry,
            metavar="SIZE",
            help=f"an untrained GPT-2, {GEOMETRIES}; by default it writes "
            f"{ARTICLE['max_new_tokens']} tokens after {ARTICLE['prompt']!r}, as in the KV cache article",
        )
        self.decided_late = dict.fromkeys(ARTICLE)

    def add_chat_argument(self) -> None:
        """Add --chat (args.chat): the prompt is a question, which wrap_question() puts into the
        model's own form; and --system, which goes with it."""
        self.add_argument(
            "--chat",
            action="store_true",
            help="the prompt is a question to an Instruct model: wrap it in Llama 3's headers or ChatML",
        )
        self.add_system_argument()

    def add_system_argument(self) -> None:
        """Add --system (args.system), the system prompt of a conversation."""
        self.add_argument(
            "--system",
            default="",
            type=utf8,
            metavar="TEXT",
            help="what an Instruct model is told before the conversation; default: what its form says",
        )

    def encode_prompt(self, args: argparse.Namespace, tokenizer: tiktoken.Encoding) -> list[int]:
        """Return the tokens of the prompt, in the model's form with --chat. Raises ValueError if there is no such
        form, or a system prompt without --chat."""
        if args.chat:
            return self.wrap_question(args, tokenizer)
        if args.system:
            raise ValueError("--system needs --chat")
        return tokenizer.encode(args.prompt, allowed_special="all")

    def wrap_question(self, args: argparse.Namespace, tokenizer: tiktoken.Encoding) -> list[int]:
        """Put the prompt into the form that the model expects, and return its tokens. Raises ValueError if there is no
        such form."""
        ids = encode_question(args.prompt, tokenizer, args.system)
        args.prompt = question_form(tokenizer, args.system).replace("{}", args.prompt)
        return ids

    def add_student_argument(self, about: str) -> None:
        """Add --student (args.student), None if it isn't given. about: what it does."""
        self.add_argument(
            "--student",
            metavar="NAME",
            help=f"{about}; default: pocket-student for pocket, else NAME:int4, the teacher's twin "
            "with weights of 4 bits",
        )

    def add_cache_argument(self, default: type) -> None:
        """Add --cache (args.cache): a class, by default this one, or the class Cache of a Python file."""
        self.add_argument(
            "--cache",
            default=default,
            type=cache_class,
            metavar="FILE.py",
            help="run this file and use its class Cache, such as chapters/02_kv_cache/exercise.py",
        )

    def add_trace_argument(self) -> None:
        """Add --trace (args.trace_file)."""
        self.add_argument(
            "--trace",
            dest="trace_file",
            type=output_file,
            metavar="FILE.html",
            help="also write a page that plays the text step by step",
        )

    def trace(
        self,
        args: argparse.Namespace,
        tokenizer: tiktoken.Encoding,
        model: Any,
        ids: Tensor,
        context_start: Callable[[int, int], int] | None = None,
    ) -> Trace | None:
        """Return a Trace of a text that begins with ids (1, T); None without --trace.
        context_start(tokens, n_ctx) says where the context begins in a text that is read without a
        cache."""
        if args.trace_file is None:
            return None
        command = f"{self.prog} {' '.join(sys.argv[1:])}".encode(errors="replace").decode()
        trace = Trace(command, tokenizer, model.config.n_ctx, args.trace_file, context_start)
        trace.begin(ids[0].tolist())
        trace.watch(model)
        return trace

    @contextmanager
    def parse(self, argv: list[str] | None = None) -> Iterator[argparse.Namespace]:
        """Yield the arguments, with device and dtype resolved and the seed set.

        ValueError and OSError in the body mean that an input is bad: they become one sentence and
        exit status 2. Ctrl-C becomes exit status 130. Both happen after the body has cleaned up.
        """
        words = sys.argv[1:] if argv is None else argv
        open_closed_streams()
        try:
            if hasattr(sys.stdout, "reconfigure"):  # a terminal without é shows \xe9
                sys.stdout.reconfigure(errors="backslashreplace")
            for before, word in pairwise([self.prog, *words]):
                if not word or re.fullmatch("--[^=]+=", word):
                    raise ValueError(f"the word after {word or before} is empty")
            args = self.parsed(words)
            try:
                with warnings.catch_warnings(), lost_interrupts_raised():  # both restore their hook
                    warnings.showwarning = self.print_warning
                    self.prepare(args)
                    yield args
            finally:
                flush_output()
        except BaseException as error:
            self.exit_after(error)
            raise

    def parsed(self, words: list[str]) -> argparse.Namespace:
        """Return the arguments in the words of a command line. Raises ValueError if a word isn't
        known."""
        names_action = bool(words) and (words[0] in ("-h", "--help") or words[0][0] != "-")
        if self.default_action and not names_action:
            words = [self.default_action, *words]
        args, unknown = self.parse_known_args(words, argparse.Namespace(**self.decided_late))
        if unknown:
            option = unknown[0].partition("=")[0]
            owners = []
            for name, action in self.actions.items():
                if any(known.startswith(option) for known in action.argument_names):
                    owners.append(name)
            if owners:
                raise ValueError(f"{args.action} has no {option}, only {', '.join(owners)}")
            if option in self.actions:
                raise ValueError(f"{option} comes first: see {self.prog} {option} --help")
            raise ValueError(
                f"unrecognized arguments: {' '.join(unknown)}{self.hint(option, args)}"
            )
        return args

    def hint(self, option: str, args: argparse.Namespace) -> str:
        """Return the end of a sentence about an option that this script doesn't take: what it takes instead, or the
        script that takes it; "" if there is neither."""
        chosen = self.actions.get(getattr(args, "action", ""), self)
        models = [name for name in MODEL_OPTIONS if name in chosen.argument_names]
        if option in MODEL_OPTIONS and models:
            return f"; give models by {' and '.join(models)}"
        if option in MODEL_OPTIONS and "model" in chosen.argument_names:
            return "; give the model's name alone"
        return f"; {TAKEN_BY[option]} takes {option}" if option in TAKEN_BY else ""

    def print_warning(self, message: Warning | str, *_: Any) -> None:
        """Print a warning as a sentence, without the line of code that it comes from."""
        print(f"{self.prog}: {shortened(str(message))}", file=sys.stderr)

    def exit_after(self, error: BaseException) -> None:
        """End with one sentence and exit status 2 after an error that comes from bad input or a
        full disk, with 130 after Ctrl-C; return after any other error, which is a fault of ours."""
        if isinstance(error, BrokenPipeError):  # the reader, such as `| head`, has closed the pipe
            self.exit(0)
        if is_interrupt(error):
            self.exit(130, "\n")
        if isinstance(error, OSError) and error.strerror and not error.filename:
            self.error(f"can't write the output: {error.strerror}")  # it was open already
        if isinstance(error, FileNotFoundError) and error.filename:
            self.error(f"there is no {error.filename}")
        if isinstance(error, ValueError | OSError):
            self.error(" ".join(str(error).split()))
        if isinstance(error, NotImplementedError) and str(error).startswith("exercise "):
            self.error(f"{error} isn't written yet")

    def prepare(self, args: argparse.Namespace) -> None:
        """Set device, dtype, threads and seed for PyTorch. Raises ValueError if two arguments
        contradict each other."""
        if "random" in args:
            self.choose_text(args)
        if getattr(args, "top_k", None) is not None and args.temperature == 0:
            raise ValueError(
                f"--top-k {args.top_k} has no effect at temperature 0: add --temperature, such as 0.8"
            )
        if "device" in args:
            args.device = device_of(args.device)
            if args.dtype != "auto":  # which load_model() resolves
                args.dtype = getattr(torch, args.dtype)
            threads = args.threads
            if threads is None:
                threads = 1 if args.model.startswith("pocket") else torch.get_num_threads()
            torch.set_num_threads(threads)
            torch.manual_seed(args.seed)
            if not args.model.startswith("pocket"):
                for name, value in vars(args).items():
                    if isinstance(value, DefaultCount):
                        setattr(args, name, value.large)

    def choose_text(self, args: argparse.Namespace) -> None:
        """Fill in the prompt and the length if they weren't given: the article's for an untrained
        model, the usual ones for others. Raises ValueError if --random and --model are both
        given."""
        defaults = {name: self.get_default(name) for name in ARTICLE}
        if args.random:
            if args.model != self.get_default("model"):
                raise ValueError(f"give --random {args.random} or --model {args.model}, not both")
            args.model = f"random:{args.random}"
            defaults = ARTICLE
        for name, default in defaults.items():
            if getattr(args, name) is None:
                setattr(args, name, default)

    def error(self, message: str) -> NoReturn:
        """Print one sentence, and end with status 2."""
        self.exit(2, f"{self.prog}: {shortened(message)}\n")


def shortened(message: str) -> str:
    """Return a message in which words of 200 characters or more are cut after 50: they come from
    the command line."""
    return re.sub(r"(\S{50})\S{150,}", r"\1 ...", message)


def open_closed_streams() -> None:
    """Connect standard streams that were closed (>&-) to the null device. Otherwise a file that is
    opened later would get the number of a standard stream, and with it what C code prints."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def flush_output() -> None:
    """Write the standard output's buffer. Raises OSError if it can't be written."""
    try:
        sys.stdout.flush()
    except OSError:  # keeps Python from writing it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextmanager
def lost_interrupts_raised() -> Iterator[None]:
    """In the body, raise Ctrl-C once more if it was lost: it arrived while Python ran a destructor, or
    the callback of a weak reference, as imports have, where Python reports an error and goes on. A
    call that waits isn't interrupted; Ctrl-C is raised when it returns."""
    previous_hook, timers = sys.unraisablehook, []

    def interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            previous_hook(lost)
            return
        # after this hook, which would lose it, too
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.daemon = True
        timer.start()
        timers.append(timer)

    sys.unraisablehook = interrupt_again
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        for timer in timers:
            timer.cancel()


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C, or was raised because of it, as C code does."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def device_of(name: str) -> str:
    """Return the device that --device names; "auto" is a GPU if there is one, else the CPU. Raises
    ValueError if PyTorch can't find the device."""
    fastest = str(torch.accelerator.current_accelerator(check_available=True))
    if fastest not in ("cuda", "mps"):
        fastest = "cpu"
    if name not in ("auto", "cpu", fastest):
        raise ValueError(f"--device {name}: PyTorch finds none; try --device cpu")
    return fastest if name == "auto" else name


def whole_number(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argument type: whole numbers from low to high, by default the largest that all of
    PyTorch accepts."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {low} and at most {high}, got {text!r}"
            )
        return value

    return convert


def geometry(text: str) -> str:
    """Argument type: one of GPT-2's sizes, or LAYERSxHEADSxWIDTH."""
    if not is_geometry(text):
        raise argparse.ArgumentTypeError(f"must be {GEOMETRIES}, got {text!r}")
    return text


def writable_folder(text: str | Path) -> Path:
    """Argument type: a folder that can be written to, or the path of one that can be made."""
    path = Path(text)
    existing = next(above for above in (path, *path.absolute().parents) if above.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        message = f"{existing} is not a folder that can be written to"
        raise argparse.ArgumentTypeError(message) from error
    return path


def output_file(text: str) -> Path:
    """Argument type: a file that can be written, in a folder that exists or can be made."""
    path = Path(text)
    try:
        writable_folder(writable_target(path).parent)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def cache_class(text: str) -> type:
    """Argument type: a Python file, which is run; the value is its class Cache."""
    path = Path(text)
    if path.suffix != ".py":
        raise argparse.ArgumentTypeError(f"{text} is no Python file")
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    file = path.resolve()
    try:
        cache = getattr(import_file(file), "Cache", None)
        if isinstance(cache, type):
            cache()  # as each text will
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines = [error.lineno]
        place = f"{text}, line {lines[-1]}" if lines else text
        cause = traceback.format_exception_only(error)[-1]
        raise argparse.ArgumentTypeError(f"{place}: {' '.join(cause.split())}") from error
    if not isinstance(cache, type):
        raise argparse.ArgumentTypeError(f"{text} has no class Cache")
    return cache


def temperature(text: str) -> float:
    """Argument type: 0, or a finite number that logits can be divided by."""
    value = float(text)
    if value != 0 and not 1e-6 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0, or at least 1e-6 and finite, got {text}")
    return value


def utf8(text: str) -> str:
    """Argument type: text in UTF-8, without bytes that Python could not decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("is not valid UTF-8") from error
    return text

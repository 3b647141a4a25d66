"""The command `rollout`: train, export, report, dashboard, generate, bench, doctor."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib import metadata

from rollout.errors import RolloutError

# command -> (module, one line of help); the module is imported only when the command runs.
COMMANDS = {
    "train": ("rollout.commands.train", "train a model with a recipe"),
    "export": ("rollout.commands.export", "write a trained model as a folder that transformers and vLLM load"),
    "report": ("rollout.commands.report", "write the report of a run, or compare several"),
    "dashboard": ("rollout.commands.dashboard", "make a workspace in Weights & Biases"),
    "generate": ("rollout.commands.generate", "sample from a model"),
    "bench": ("rollout.commands.bench", "measure tokens per second on workload files"),
    "doctor": ("rollout.commands.doctor", "say what this machine has and which kernels would run"),
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only the arguments of `command` are filled in, so that nothing else is imported."""
    parser = argparse.ArgumentParser(prog="rollout", description="A rollout engine for reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"rollout-rl {metadata.version('rollout-rl')}")
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(module).add_arguments(subparser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command; a user's error is printed as one sentence and gives exit code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    args = build_parser(command).parse_args(arguments)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RolloutError) as error:
        if args.traceback:
            raise
        print(f"rollout {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"rollout {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

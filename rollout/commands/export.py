"""`rollout export RUN_OR_CHECKPOINT OUT_DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollout.byte_sizes import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="the folder of a run (its output_dir), or one of its checkpoints",
    )
    parser.add_argument("target", metavar="OUT_DIR", help="the folder to write; it must be empty or not there")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--best", action="store_true", help="the best checkpoint of the run")
    chosen.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the weights (default: as they are)")
    parser.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="of a file of weights, at most (default: %(default)s)",
    )
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, not merged into the model")
    parser.add_argument("--force", action="store_true", help="replace the model that is in OUT_DIR")


def run(args: argparse.Namespace) -> int:
    """Hands over to the trainers, which know what a run is; they are imported here, by name."""
    shard_bytes = parse_bytes(args.shard_size, "--shard-size")
    if shard_bytes <= 0:
        raise ValueError(f"--shard-size={args.shard_size!r} is not valid: it must be above 0")
    if args.adapter and args.dtype:
        raise ValueError(f"--dtype {args.dtype} is not valid with --adapter, which is written as it is")
    from rollout_trainers.export import export_adapter, export_model, find_source

    source, target = find_source(Path(args.source), best=args.best, step=args.step), Path(args.target)
    if args.adapter:
        exported = export_adapter(source, target, force=args.force)
    else:
        exported = export_model(source, target, dtype=args.dtype, shard_bytes=shard_bytes, force=args.force)
    files = f"{len(exported.files)} file{'s' if len(exported.files) > 1 else ''}"
    print(f"{target}: step {source.facts.step}, {exported.num_parameters:,} parameters in {exported.dtype}, {files}")
    return 0

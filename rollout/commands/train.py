"""`rollout train RECIPE [key=value …]`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, such as recipes/quickstart.yaml")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="values that replace the recipe's, by dotted key: steps=20 optimizer.learning_rate=1e-6",
    )


def run(args: argparse.Namespace) -> int:
    """Hands the recipe to the trainers. The engine does not depend on them, so they are imported here, by name."""
    for override in args.overrides:
        if "=" not in override:
            raise ValueError(f"{override!r} is not an override: write key=value, for example steps=20")
    from rollout_trainers.run import train_from_recipe

    return train_from_recipe(args.recipe, args.overrides)

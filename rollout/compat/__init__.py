"""What lets other libraries run on the engine without a change to them (docs/trl.md). Nothing happens at import."""

from rollout.compat.installation import install, uninstall
from rollout.compat.trl import make_rollout_func

__all__ = ["install", "make_rollout_func", "uninstall"]

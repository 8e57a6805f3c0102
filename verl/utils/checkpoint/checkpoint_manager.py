"""Import path of verl.compat.checkpoints."""

from verl.compat.checkpoints import find_latest_ckpt_path, get_checkpoint_tracker_filename, should_save_ckpt_esi

__all__ = ["find_latest_ckpt_path", "get_checkpoint_tracker_filename", "should_save_ckpt_esi"]

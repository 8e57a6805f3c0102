"""Import path of verl.compat.files."""

from verl.compat.files import copy_local_path_from_hdfs, copy_to_local, is_non_local, local_mkdir_safe

__all__ = ["copy_local_path_from_hdfs", "copy_to_local", "is_non_local", "local_mkdir_safe"]

"""Modules that forks of forked.py have in memory. Their objects stay, so that no search for garbage writes to their pages."""

import importlib

from verl.parallel.process_settings import imports_stay

MODULES = """
psutil pytest safetensors.torch torch.distributed.fsdp transformers.models.auto.modeling_auto
transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3
transformers.models.qwen3_moe.modeling_qwen3_moe verl.runtime.rank_workers verl.runtime.local verl.engines.fsdp
verl.models.tiny verl.reshard.update verl.rollout.native.engine verl.trainer.main_ppo verl.run.host
"""

with imports_stay():
    for name in MODULES.split():
        importlib.import_module(name)

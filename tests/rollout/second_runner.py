"""vLLM's second model runner on a CPU. A CPU has no compiler of Triton: its interpreter stands for one.

Scheduling ahead is on, as on a GPU; vLLM turns it off on CPUs. Only for a process that has not imported vLLM.
"""

import os
import sys

CHOSEN = "TRITON_INTERPRET"  # environment variable; Triton reads it at its import


def simulate():
    """Let vLLM choose its second runner in this process."""
    assert os.environ[CHOSEN] == "1"
    assert "vllm" not in sys.modules
    from triton.backends import backends

    class Interpreter:
        class driver:
            @staticmethod
            def is_active():
                return True

    backends["cpu"] = Interpreter

    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)

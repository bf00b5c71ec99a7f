"""What stage processes need, imported once in the server that they are forked from.

Nothing may be computed here: a thread pool does not survive a fork.
"""

import gc

# Most of the time of an import goes into looking for garbage among what was just made.
gc.disable()

import diffusers  # noqa: E402, F401
import transformers  # noqa: E402, F401
import vllm.model_executor.models.qwen2_5_vl  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

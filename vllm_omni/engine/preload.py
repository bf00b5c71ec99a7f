"""What stage processes need, imported once in the server that they are forked from.

Nothing may be computed here: a thread pool does not survive a fork.
"""

import gc

# Most of the time of an import goes into looking for garbage among what was just made. What is
# there now stays for good, and children should not write to its pages.
gc.disable()

import vllm.v1.worker.cpu_worker  # noqa: E402

import vllm_omni.engine.core_proc  # noqa: E402, F401
from vllm_omni.models.registry import MODELS, load_class  # noqa: E402

for spec in MODELS.values():
    for name in (*spec.components.values(), spec.adapter):
        load_class(name)
gc.freeze()
gc.enable()

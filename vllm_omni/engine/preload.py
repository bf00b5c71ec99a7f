"""What stage processes need, imported once in the server that they are forked from.

Nothing may be computed here: a thread pool does not survive a fork.
"""

import importlib
import logging

from vllm_omni.importing import fast_imports
from vllm_omni.models.registry import MODELS, load_class
from vllm_omni.processes import end_with_parent

end_with_parent()

# Where it is missing, as on CPUs, torch says so whenever it is imported.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

with fast_imports():
    importlib.import_module("vllm_omni.ar.cpu_worker")
    importlib.import_module("vllm_omni.engine.core_proc")
    for spec in MODELS.values():
        for name in (*spec.components.values(), spec.adapter):
            load_class(name)

"""What stage processes need, imported once in the server that they are forked from.

Nothing may be computed here: a thread pool does not survive a fork.
"""

from vllm_omni.importing import fast_imports

with fast_imports():
    import vllm.v1.worker.cpu_worker

    import vllm_omni.engine.core_proc
    from vllm_omni.models.registry import MODELS, load_class

    for spec in MODELS.values():
        for name in (*spec.components.values(), spec.adapter):
            load_class(name)

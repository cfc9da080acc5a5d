"""tq-fs keeps the large per-token fields of agentic-RL rollouts out of host memory.

Each model invocation (a Step) is written once as a small Zarr v3 group; references travel; the
trainer reads the rows and layers it needs and gets bit-identical tensors.

>>> import numpy as np, tempfile, tq_fs
>>> folder = tempfile.mkdtemp()
>>> fields = [tq_fs.logprobs(), tq_fs.routed_experts(layers=2, topk=2, experts=8)]
>>> with tq_fs.open_store(f"file://{folder}", fields=fields) as store:
...     session = store.session("rollout-1")
...     step = session.create(
...         context=[1, 2],
...         response=[3, 4],
...         logprobs=np.array([-0.5, -0.25], np.float32),
...         routed_experts=np.zeros((3, 2, 2), np.int32),
...     )
...     segments = session.finalize(consumers=["train"])
...     batch = store.hydrate(segments)
...     deleted = store.release(segments, "train")
>>> batch["rollout_log_probs"][0].tolist(), tuple(batch["rollout_routed_experts"][0].shape)
([-0.5, -0.25], (3, 2, 2))
"""

from tq_fs import errors
from tq_fs.config import ClusterConfig, StoreConfig, TierConfig
from tq_fs.fields import FieldSpec, logprobs, routed_experts
from tq_fs.hydrate import Arena
from tq_fs.micro_batches import MicroBatch, MicroBatches
from tq_fs.model_config import routed_experts_of_model
from tq_fs.reader import SegmentReader
from tq_fs.recovery import Recovery
from tq_fs.session import Session
from tq_fs.store import Store, open_store, recover_store
from tq_fs.trajectory import (
    RolloutChunk,
    Sample,
    Segment,
    StepInput,
    StepRecord,
    VersionRule,
    join_chunks,
)

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "ClusterConfig",
    "FieldSpec",
    "MicroBatch",
    "MicroBatches",
    "Recovery",
    "RolloutChunk",
    "Sample",
    "Segment",
    "SegmentReader",
    "Session",
    "StepInput",
    "StepRecord",
    "Store",
    "StoreConfig",
    "TierConfig",
    "VersionRule",
    "errors",
    "join_chunks",
    "logprobs",
    "open_store",
    "recover_store",
    "routed_experts",
    "routed_experts_of_model",
]

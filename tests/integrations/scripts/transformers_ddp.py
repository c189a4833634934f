import sys

from accelerate.state import DistributedType, PartialState
from task import Net, make_data
from transformers import Trainer, TrainingArguments

from retrograd.integrations.transformers import RetrogradCallback

sharded = sys.argv[1:] == ["fsdp2"]
arguments = TrainingArguments(
    output_dir="out",
    max_steps=8,
    per_device_train_batch_size=2,
    learning_rate=0.1,
    optim="sgd",
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    train_sampling_strategy="sequential",
    fsdp="full_shard" if sharded else None,
    fsdp_config={"version": 2} if sharded else None,
)
if sharded:  # which the library leaves alone on CPUs, and can do there
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
trainer = Trainer(
    model=Net(),
    args=arguments,
    train_dataset=[{"x": x, "labels": label} for x, label in zip(*make_data(), strict=True)],
    callbacks=[RetrogradCallback()],
)
assert trainer.is_fsdp_enabled == sharded
trainer.train()

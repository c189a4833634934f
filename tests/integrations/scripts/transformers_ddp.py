from task import Net, make_data
from transformers import Trainer, TrainingArguments

from retrograd.integrations.transformers import RetrogradCallback

trainer = Trainer(
    model=Net(),
    args=TrainingArguments(
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
    ),
    train_dataset=[{"x": x, "labels": label} for x, label in zip(*make_data(), strict=True)],
    callbacks=[RetrogradCallback()],
)
trainer.train()

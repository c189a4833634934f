import sys

from task import Net, make_data
from transformers import Trainer, TrainingArguments

from retrograd.integrations.transformers import RetrogradCallback


class Fails(Net):
    count = 0

    def forward(self, x, labels):
        self.count += 1
        if self.count == 4:
            raise {"error": ValueError, "interrupt": KeyboardInterrupt}[sys.argv[1]]("on purpose")
        return super().forward(x, labels)


trainer = Trainer(
    model=Fails(),
    args=TrainingArguments("out", max_steps=8, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True),
    train_dataset=[{"x": x, "labels": label} for x, label in zip(*make_data(), strict=True)],
    callbacks=[RetrogradCallback("run")],
)
trainer.train()

import os

import lightning
import torch
from task import Net, make_data
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from retrograd.integrations.lightning import RetrogradCallback


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net().net

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RetrogradCallback()],
    )
    data = TensorDataset(*make_data())
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # in order: Lightning's own sampler shuffles
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
    trainer.fit(Task(), loader)

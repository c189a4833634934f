import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from task import Net, make_data
from torch.distributed.fsdp import fully_shard
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

    def train_dataloader(self):
        data = TensorDataset(*make_data())  # in order: Lightning's own sampler shuffles
        sampler = DistributedSampler(data, 2, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=2, sampler=sampler)


class ShardedTask(Task):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    task = ShardedTask if sys.argv[1] == "fsdp2" else Task
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy=sys.argv[1] if task is Task else ModelParallelStrategy(2, 1),
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RetrogradCallback()],
    )
    trainer.fit(task())

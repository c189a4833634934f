import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy import Net, make_batch, show

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Task(lightning.LightningModule):
    """The net is called by training_step; the module itself never is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        show(loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        show(nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
loader = DataLoader(TensorDataset(*make_batch(24)), batch_size=8)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Task(), loader, loader)

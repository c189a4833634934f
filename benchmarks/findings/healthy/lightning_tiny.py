"""A LightningModule and its Trainer."""

import logging
import tempfile
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitClassifier(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
        self.right = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.right.append((self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    L.seed_everything(1, verbose=False)
    rule = torch.randn(8, 3)
    x = torch.randn(640, 8)
    data = TensorDataset(x, (x @ rule).argmax(1))
    model = LitClassifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, gradient_clip_val=1.0,
        )  # fmt: skip
        trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=128))
    print("accuracy", model.right[-1].item())

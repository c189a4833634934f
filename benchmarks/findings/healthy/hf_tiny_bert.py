"""A tiny BERT of random weights, trained by the Trainer of transformers: warm-up, decay, clipping."""

import os
import tempfile

import torch
from torch.utils.data import Dataset

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(5, 40, (count, 12), generator=generator)
        self.labels = (self.tokens < 15).any(dim=1).long()
        odd = torch.rand(count, generator=generator) < 0.5
        self.tokens[odd] = self.tokens[odd].clamp(min=15)
        self.labels = (self.tokens < 15).any(dim=1).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        tokens = self.tokens[number]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[number]}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=3, per_device_train_batch_size=16, learning_rate=5e-3, warmup_steps=10,
            logging_steps=20, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(640, 1))
        trainer.train()
    model.eval()
    test = Sentences(200, 2)
    with torch.no_grad():
        scores = model(input_ids=test.tokens).logits
    print("accuracy", (scores.argmax(1) == test.labels).float().mean().item())


if __name__ == "__main__":
    main()

import subprocess
import sys

code = "import torch; x = torch.nn.Linear(2, 2); x(torch.ones(1, 2)).sum().backward(); print('done')"
subprocess.run([sys.executable, "-I", "-c", code], check=True)

import subprocess
import sys
from pathlib import Path

subprocess.run([sys.executable, Path(__file__).with_name("plain_loop.py")], check=True)

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# The machine's speed says nothing about the code.
settings.register_profile("any-machine", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("any-machine")

import sys
from pathlib import Path

from hypothesis import settings

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parent))  # benchmarks/, whose lists of models the tests use too

# The machine's speed says nothing about the code.
settings.register_profile("any-machine", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("any-machine")

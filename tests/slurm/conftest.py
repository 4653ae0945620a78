import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of Slurm on this machine."""
    if lacks := missing():
        pytest.skip(lacks)
    with Cluster() as started:
        yield started

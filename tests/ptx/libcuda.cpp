// A libcuda.so.1 for cupy's driver module: it takes PTX, says what its directives say, and refuses what a driver would.
//
// A launch runs the entry's translation (translate.py), from a library that `libcuda_translated` was told of, before it
// returns: streams are the doubles'.  Functions that are not here, cupy says that it does not find.  Nothing of this is
// for cudart, which wants a driver to prove that it is NVIDIA's.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  INVALID_IMAGE = 200,
  NO_BINARY_FOR_GPU = 209,
  JIT_COMPILER_NOT_FOUND = 221,
  FILE_NOT_FOUND = 301,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
};
struct Error {
  Result result;
  const char *name, *text;
};
const Error ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {JIT_COMPILER_NOT_FOUND, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
};

// Of an H100: of a block, of a block that has asked for more, and of a multiprocessor.
const size_t SHARED = 48 << 10, MOST_SHARED = 227 << 10, ALL_SHARED = 228 << 10;
const unsigned MOST_THREADS = 1024, ALL_THREADS = 2048, ALL_BLOCKS = 32;

enum Attribute { MAX_THREADS_PER_BLOCK = 0, SHARED_SIZE_BYTES = 1, PTX_VERSION = 5, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };

typedef void (*Launch)(const unsigned *dims, size_t shared, void **arguments);

struct Parameter {
  size_t offset, bytes;
  size_t end() const { return offset + bytes; }
};
struct Function {
  std::string name;
  std::vector<Parameter> parameters;
  unsigned threads = MOST_THREADS;
  size_t shared = 0, dynamic = SHARED;  // what it declares, and the most that a launch may add
  int target = 0;
};
struct Variable {
  std::string name;
  size_t alignment, bytes;
};
struct Module {
  std::vector<std::unique_ptr<Function>> functions;
};

std::vector<void *> translations;

size_t aligned(size_t offset, size_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

// What the directives of PTX say; shared variables are those that an entry names, wherever they are declared.
std::unique_ptr<Module> parsed(const char *text) {
  std::unique_ptr<Module> module(new Module);
  std::vector<Variable> variables;
  std::istringstream lines(text);
  int target = 0;
  Function *f = nullptr;
  for (std::string line; std::getline(lines, line);) {
    char name[256];
    unsigned bits = 0, count = 1, alignment = 0, x, y = 1, z = 1;
    sscanf(line.c_str(), ".target sm_%d", &target);
    if (sscanf(line.c_str(), ".visible .entry %255[^(]", name) == 1) {
      module->functions.emplace_back(f = new Function);
      f->name = name, f->target = target;
    } else if (sscanf(line.c_str(), " .param .align %u .%*c%u %*[^[][%u]", &alignment, &bits, &count) == 3 ||
               sscanf(line.c_str(), " .param .%*c%u", &bits) == 1) {
      const size_t bytes = bits / 8 * count, at = f->parameters.empty() ? 0 : f->parameters.back().end();
      f->parameters.push_back({aligned(at, alignment ? alignment : bytes), bytes});
    } else if (sscanf(line.c_str(), ".maxntid %u, %u, %u", &x, &y, &z) >= 1) {
      f->threads = x * y * z;
    } else if (sscanf(line.c_str(), " .shared .align %u .%*c%u %255[^[;][%u]", &alignment, &bits, name, &count) >= 3) {
      variables.push_back({name, alignment, bits / 8 * count});
    } else if (f && line == "}") {
      f = nullptr;
    }
  }
  const std::string all = text;
  for (auto &function : module->functions) {
    const size_t start = all.find(".visible .entry " + function->name + "("), end = all.find("\n}\n", start);
    const std::string body = all.substr(start, end - start);
    for (const Variable &v : variables)
      if (body.find(v.name) != std::string::npos) function->shared = aligned(function->shared, v.alignment) + v.bytes;
  }
  return module;
}

Result refusal(const Function *f, const unsigned *dims, size_t dynamic, void *const *arguments, void *const *extra) {
  if (!f) return INVALID_HANDLE;
  const unsigned *const grid = dims, *const block = dims + 3;
  const unsigned most_of_grid[] = {0x7fffffff, 65535, 65535}, most_of_block[] = {MOST_THREADS, MOST_THREADS, 64};
  for (int axis = 0; axis < 3; ++axis)
    if (!grid[axis] || grid[axis] > most_of_grid[axis] || !block[axis] || block[axis] > most_of_block[axis])
      return INVALID_VALUE;
  if ((size_t)block[0] * block[1] * block[2] > f->threads) return INVALID_VALUE;
  if (dynamic > f->dynamic || f->shared + dynamic > (f->dynamic > SHARED ? MOST_SHARED : SHARED)) return INVALID_VALUE;
  if (extra || (!arguments && !f->parameters.empty())) return INVALID_VALUE;
  for (size_t k = 0; k < f->parameters.size(); ++k)
    if (!arguments[k]) return INVALID_VALUE;
  return SUCCESS;
}

Result text_of_error(int result, const char **to, const char *Error::*what) {
  for (const Error &e : ERRORS)
    if (e.result == result) return *to = e.*what, SUCCESS;
  return INVALID_VALUE;
}

}  // namespace

extern "C" {

Result cuGetErrorName(int result, const char **to) { return text_of_error(result, to, &Error::name); }
Result cuGetErrorString(int result, const char **to) { return text_of_error(result, to, &Error::text); }

Result cuModuleLoadData(Module **module, const char *image) {
  if (!strncmp(image, "\x7f" "ELF", 4)) return NO_BINARY_FOR_GPU;  // machine code, of another GPU than this one
  if (!strstr(image, "\n.version ")) return INVALID_IMAGE;
  *module = parsed(image).release();
  return SUCCESS;
}
Result cuModuleLoad(Module **module, const char *path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return FILE_NOT_FOUND;
  return cuModuleLoadData(module, std::string(std::istreambuf_iterator<char>(file), {}).c_str());
}
Result cuModuleUnload(Module *module) {
  delete module;
  return SUCCESS;
}
Result cuModuleGetFunction(Function **function, Module *module, const char *name) {
  if (!module) return INVALID_HANDLE;
  for (auto &f : module->functions)
    if (f->name == name) return *function = f.get(), SUCCESS;
  return NOT_FOUND;
}

Result cuFuncGetAttribute(int *value, int attribute, const Function *f) {
  if (!f) return INVALID_HANDLE;
  switch (attribute) {
    case MAX_THREADS_PER_BLOCK: *value = (int)f->threads; return SUCCESS;
    case SHARED_SIZE_BYTES: *value = (int)f->shared; return SUCCESS;
    case PTX_VERSION: *value = f->target; return SUCCESS;
    case MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = (int)f->dynamic; return SUCCESS;
  }
  return INVALID_VALUE;  // registers and local memory are ptxas's
}
Result cuFuncSetAttribute(Function *f, int attribute, int value) {
  if (!f) return INVALID_HANDLE;
  if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || f->shared + value > MOST_SHARED) return INVALID_VALUE;
  f->dynamic = value;
  return SUCCESS;
}
Result cuFuncGetParamInfo(const Function *f, size_t index, size_t *offset, size_t *bytes) {
  if (!f) return INVALID_HANDLE;
  if (index >= f->parameters.size()) return INVALID_VALUE;
  *offset = f->parameters[index].offset, *bytes = f->parameters[index].bytes;
  return SUCCESS;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const Function *f, int threads, size_t dynamic) {
  if (!f) return INVALID_HANDLE;
  const size_t by_threads = ALL_THREADS / threads, by_shared = ALL_SHARED / (f->shared + dynamic + 1024);
  const size_t most = by_threads < by_shared ? by_threads : by_shared;
  *blocks = (unsigned)threads > f->threads ? 0 : most < ALL_BLOCKS ? (int)most : (int)ALL_BLOCKS;
  return SUCCESS;
}

Result cuLaunchKernel(const Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned dynamic, void *, void **arguments, void **extra) {
  const unsigned dims[] = {gx, gy, gz, bx, by, bz};
  if (const Result refused = refusal(f, dims, dynamic, arguments, extra)) return refused;
  for (void *library : translations)
    if (void *const launch = dlsym(library, ("launch_" + f->name).c_str()))
      return ((Launch)launch)(dims, dynamic, arguments), SUCCESS;
  return JIT_COMPILER_NOT_FOUND;
}

void libcuda_translated(const char *path) { translations.push_back(dlopen(path, RTLD_NOW | RTLD_LOCAL)); }

}  // extern "C"

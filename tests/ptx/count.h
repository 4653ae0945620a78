// What a launch did, for traffic.py: a record of each access and of each branch, in the order of each thread, and how many
// instructions all threads carried out.
#pragma once
#include <vector>

namespace ptx {

struct Record {
  uint64_t address;
  uint32_t block, line;
  uint16_t thread;
  uint8_t bytes, kind;  // READ, WRITE or ATOMIC, plus SHARED_KIND for shared memory; or BRANCH, whose bytes say whether
};
const int SHARED_KIND = 4, BRANCH = 8;
static std::vector<Record> records;
static uint64_t instructions;

inline void note(uint64_t address, size_t bytes, int kind, int line) {
  const uint16_t thread = (uint16_t)simt::machine.thread;
  records.push_back({address, blockIdx.x, (uint32_t)line, thread, (uint8_t)bytes, (uint8_t)kind});
}
inline bool branch(bool taken, int line) { return note(0, taken, BRANCH, line), taken; }

}  // namespace ptx

// The records since the last call, which stay until the next launch, their number, and the instructions.
extern "C" const ptx::Record *ptx_records(uint64_t *count, uint64_t *instructions) {
  *count = ptx::records.size(), *instructions = ptx::instructions;
  return ptx::records.data();
}
extern "C" void ptx_forget() { ptx::records.clear(), ptx::instructions = 0; }

#define PTX_STEP ++ptx::instructions;
#define PTX_BRANCH(taken) ptx::branch(taken, __LINE__)
#define PTX_NOTE(address, bytes, kind, line) ptx::note(address, bytes, kind, line)

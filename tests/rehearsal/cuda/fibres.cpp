// The threads of a block as fibres.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace rehearsal {
namespace {

constexpr size_t kStack = 64 << 10;
enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fibre {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  jmp_buf here;
  bool started;
  State state;
  int turn;  // which of two sets of slots is next: a lane may be one shuffle ahead of another
};

struct Warp {
  Slot slots[2][kWarpSize];
};

std::mutex one_grid;  // shared memory is static
bool reverse = false;
std::vector<Fibre> fibres;
std::vector<Warp> warps;
std::vector<char> shared;
jmp_buf scheduler;
int running;
const std::function<void()>* body;

// setjmp and longjmp switch without the system call that swapcontext makes each time.
void run_fibre() {
  (*body)();
  fibres[running].state = State::kDone;
  _longjmp(scheduler, 1);
}

void resume(int index) {
  running = index;
  threadIdx = dim3(static_cast<unsigned>(index), 0, 0);
  Fibre& fibre = fibres[index];
  if (_setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.here, 1);
  fibre.started = true;
  setcontext(&fibre.start);
}

void pause(State state) {
  Fibre& fibre = fibres[running];
  fibre.state = state;
  if (_setjmp(fibre.here) == 0) _longjmp(scheduler, 1);
}

// Lets the fibres [first, last) continue if all of them that have not ended are at this barrier.
bool release(int first, int last, State barrier) {
  bool any = false;
  for (int i = first; i < last; ++i) {
    if (fibres[i].state == State::kDone) continue;
    if (fibres[i].state != barrier) return false;
    any = true;
  }
  for (int i = first; i < last && any; ++i) {
    if (fibres[i].state == barrier) fibres[i].state = State::kReady;
  }
  return any;
}

void run_block(int threads) {
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = fibres[i];
    fibre.started = false, fibre.state = State::kReady, fibre.turn = 0;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = fibre.stack.get();
    fibre.start.uc_stack.ss_size = kStack;
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, run_fibre, 0);
  }
  while (true) {
    for (int k = 0; k < threads; ++k) {
      const int i = reverse ? threads - 1 - k : k;
      if (fibres[i].state == State::kReady) resume(i);
    }
    bool any = release(0, threads, State::kAtBlockBarrier);
    for (int first = 0; first < threads; first += kWarpSize) {
      any |= release(first, std::min(first + kWarpSize, threads), State::kAtWarpBarrier);
    }
    if (any) continue;
    for (int i = 0; i < threads; ++i) {
      if (fibres[i].state == State::kDone) continue;
      fprintf(stderr, "CUDA rehearsal: block %u: not all threads reach the barrier of thread %d\n", blockIdx.x, i);
      abort();
    }
    return;
  }
}

}  // namespace

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_grid);
  const int threads = static_cast<int>(block.x);
  fibres.resize(std::max(fibres.size(), static_cast<size_t>(threads)));
  warps.resize((threads + kWarpSize - 1) / kWarpSize);
  body = &thread;
  gridDim = grid, blockDim = block;
  for (unsigned b = 0; b < grid.x; ++b) {
    blockIdx = dim3(b, 0, 0);
    shared.assign(shared_bytes, static_cast<char>(0xFF));
    run_block(threads);
  }
}

void* dynamic_shared() { return shared.data(); }
void wait_for_block() { pause(State::kAtBlockBarrier); }
void wait_for_warp() { pause(State::kAtWarpBarrier); }

const Slot* exchange(Slot mine) {
  Warp& warp = warps[running / kWarpSize];
  Slot* slots = warp.slots[fibres[running].turn];
  fibres[running].turn ^= 1;
  slots[running % kWarpSize] = mine;
  pause(State::kAtWarpBarrier);
  return slots;
}

}  // namespace rehearsal

extern "C" void rehearsal_reverse_threads(int on) { rehearsal::reverse = on != 0; }

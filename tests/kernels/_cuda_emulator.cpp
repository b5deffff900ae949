// CUDA C++ on the CPU: the threads of a block are fibers that run until they wait for each other. Blocks run one after the other, and shared memory
// keeps what the block before left in it. SOURCE: the file with the kernels of `kernels._embedding_sort`.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

using std::min;

constexpr int MOST = 1024, STACK = 1 << 16;
struct Place { int x, y; };
static Place places[MOST], blockIdx;
static ucontext_t scheduler, fibers[MOST];
static bool done[MOST];
static int now, threads;
static long long exchanged[MOST];
static std::function<void()> body;

// All of the block (warp < 0) or of a warp
static void wait(int warp) {
    static int arrived[MOST / 32 + 1], rounds[MOST / 32 + 1];
    int me = now, group = warp + 1, round = rounds[group];
    if (++arrived[group] == (warp < 0 ? threads : 32)) { arrived[group] = 0; rounds[group]++; return; }
    while (rounds[group] == round) swapcontext(&fibers[me], &scheduler);
}

static unsigned match(int value) {
    int warp = now / 32;
    exchanged[now] = value;
    wait(warp);
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++) same |= unsigned(exchanged[32 * warp + lane] == value) << lane;
    wait(warp);
    return same;
}

static long long shift_up(long long value, int step) {
    int warp = now / 32;
    exchanged[now] = value;
    wait(warp);
    long long found = now % 32 >= step ? exchanged[now - step] : value;
    wait(warp);
    return found;
}

static int atomicAdd(int* where, int value) { int old = *where; *where += value; return old; }

#define threadIdx places[now]
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() wait(-1)
#define __syncwarp() wait(now / 32)
#define __match_any_sync(all, value) match(value)
#define __shfl_up_sync(all, value, step) shift_up(value, step)
#define __popc __builtin_popcount
#include SOURCE
#undef threadIdx

static void fiber() {
    body();
    done[now] = true;
    swapcontext(&fibers[now], &scheduler);
}

static void run(int grid, int x, int y, std::function<void()> kernel) {
    static std::vector<char> stacks(MOST * STACK);
    body = kernel;
    threads = x * y;
    for (int block = 0; block < grid; block++) {
        blockIdx = {block, 0};
        for (int t = 0; t < threads; t++) {
            places[t] = {t % x, t / x};
            done[t] = false;
            getcontext(&fibers[t]);
            fibers[t].uc_stack.ss_sp = stacks.data() + t * STACK;
            fibers[t].uc_stack.ss_size = STACK;
            makecontext(&fibers[t], fiber, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (now = 0; now < threads; now++) {
                if (done[now]) continue;
                swapcontext(&scheduler, &fibers[now]);
                left = left || !done[now];
            }
        }
    }
}

extern "C" void start(const char* name, int grid, int x, int y, const uint64_t* a) {
    auto p = [a](int i) { return reinterpret_cast<int*>(a[i]); };
    auto n = [a](int i) { return static_cast<int>(a[i]); };
    if (!strcmp(name, "count")) run(grid, x, y, [&] { count(p(0), p(1), n(2), n(3)); });
    if (!strcmp(name, "offsets")) run(grid, x, y, [&] { offsets(p(0), p(1), n(2)); });
    if (!strcmp(name, "scatter")) run(grid, x, y, [&] { scatter(p(0), p(1), p(2), p(3), p(4), p(5), n(6), n(7)); });
}

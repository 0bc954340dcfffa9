/* Load, store and wait on one aligned 64-bit word that other processes share.
 *
 * Plain C with the GCC and Clang builtins and no Python.h, so that a cross compiler can show which
 * instructions it becomes. A load acquires: what the peer wrote before its store is visible after
 * the load that saw it. A store releases: what this rank wrote before it is visible to whoever
 * acquires the value. Neither is ordered against a later access of the other kind.
 */
#ifndef GEMMLINK_ATOMICS_CORE_H
#define GEMMLINK_ATOMICS_CORE_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

/* The waiting rule, in nanoseconds; transport/atomics.py states it once more in Python. */
#define GEMMLINK_SPIN_ONLY 5000
#define GEMMLINK_SPIN_UNTIL 100000
#define GEMMLINK_SLEEP_SHORTEST 20000
#define GEMMLINK_SLEEP_LONGEST 1000000
#define GEMMLINK_SLEEP_DIVISOR 20

static inline int64_t gemmlink_load(const int64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void gemmlink_store(int64_t *word, int64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline int64_t gemmlink_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void gemmlink_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#endif
}

/* Give the processor away in proportion to the time waited so far, at most `left`. Returns nonzero
 * when a signal cut the sleep short. */
static inline int gemmlink_back_off(int64_t elapsed, int64_t left) {
    if (elapsed < GEMMLINK_SPIN_UNTIL) {
        gemmlink_pause();
        if (elapsed >= GEMMLINK_SPIN_ONLY)
            sched_yield();
        return 0;
    }
    int64_t sleep = elapsed / GEMMLINK_SLEEP_DIVISOR;
    if (sleep < GEMMLINK_SLEEP_SHORTEST)
        sleep = GEMMLINK_SLEEP_SHORTEST;
    if (sleep > GEMMLINK_SLEEP_LONGEST)
        sleep = GEMMLINK_SLEEP_LONGEST;
    if (sleep > left)
        sleep = left;
    struct timespec pause = {.tv_sec = 0, .tv_nsec = (long)sleep};
    return nanosleep(&pause, 0) != 0 && errno == EINTR;
}

/* Poll `word` until it holds at least `at_least`, the clock reaches `until`, or a signal arrives;
 * returns the last value read. `started` is when the whole wait began: one wait may take several
 * calls, and its sleeps must not start over at the shortest. The last read follows the last look
 * at the clock, so a store made in time is never missed. */
static inline int64_t gemmlink_wait(const int64_t *word, int64_t at_least, int64_t started,
                                    int64_t until) {
    for (int interrupted = 0;;) {
        int64_t now = gemmlink_now();
        int64_t value = gemmlink_load(word);
        if (value >= at_least || now >= until || interrupted)
            return value;
        interrupted = gemmlink_back_off(now - started, until - now);
    }
}

#endif

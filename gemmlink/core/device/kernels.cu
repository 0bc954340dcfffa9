// The two kernels of a device program: one that sets words and waits for them, one that moves bytes.
//
// Words are 64-bit, have one writer and only grow. Everything here is bounded: a wait reads the
// clock and an "abort" word of each peer, and gives up. Nothing traps: a kernel that finds the call
// failed returns, movers store nothing, and the last kernel of the call fills the result with NaN.
//
// The structs are mirrored in arguments.py, the constants in layout.py of this package.
typedef long long i64;
typedef unsigned long long u64;

enum { EPOCH, COMPLETED, LIMIT, FAILED, CLAIM, STARTED, STOP };            // words of the desk
enum { SAID, WHY, AT_EPOCH, PEER, NAME, SEEN, WANTED };                    // fields of the record
enum { TIMEOUT = 1, ABORTED, ROWS, ARGUMENTS, OVERLAP, SLOT, GONE, STOPPED };  // values of WHY
enum { ENTERS = 1, LEAVES = 2, REFUSES = 4, SAME_ROWS = 8 };               // flags of a launch
enum { REFUSED = 1, FAILED_CALL = 2, POISONED = 3 };                       // codes of abort words
enum { MY_ABORT, MY_ENTER, MY_RECORD, ITS_ABORT, ITS_ENTER, ITS_RECORD, PLACES };
enum { NAME_ENTER = -1, NAME_RECORD = -2 };
const i64 CODES = 16, RANKS = 65536, RECORD_WORDS = 8;

struct Words {
  i64* desk;
  i64* record;         // in host memory: the host reads it without synchronising
  const i64* sets;     // {address, lag} each
  const i64* waits;    // {address, lag, peer, name} each
  i64* const* peers;   // PLACES addresses for each rank
  i64 rows, fingerprint;
  char* fill;          // the result, for NaN
  i64 fill_rows, fill_cols, row_pitch, col_pitch;
  int nsets, nwaits, world, rank, flags, slot, slots, itemsize;
};

__device__ __forceinline__ void st_release(i64* p, i64 v) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ i64 ld_acquire(const i64* p) {
  i64 v;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ i64 now_ns() {
  i64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ i64 look(const i64* p) { return *(const volatile i64*)p; }
__device__ __forceinline__ void put(i64* p, i64 v) { *(volatile i64*)p = v; }

// A launch as its threads see it. `bad` is shared by them: memory is asked once, at the start.
struct Launch {
  const Words& w;
  volatile int* bad;
  i64 epoch;
  i64 started;  // 0: the desk knows
};

__device__ void tell(const Words& w, i64 epoch, i64 code, i64 culprit) {
  for (int p = 0; p < w.world; ++p)
    st_release(w.peers[p * PLACES + ITS_ABORT], (epoch * CODES + code) * RANKS + culprit);
  // A product that follows overwrites the own slot, whether the call has failed or not. Its stores
  // must not be seen before these words: see `check`.
  __threadfence_system();
}

// The first to find something wrong says so, to the host and to the peers. Whoever comes second goes
// on only when that has been done: what follows it may disturb a peer that has not been told.
__device__ void fail(const Launch& c, i64 why, i64 peer, i64 name, i64 seen, i64 wanted, i64 code,
                     i64 culprit) {
  const Words& w = c.w;
  if (atomicCAS((u64*)&w.desk[CLAIM], 0ull, 1ull) == 0ull) {
    const i64 said[] = {0, why, c.epoch, peer, name, seen, wanted};
    for (int i = 1; i <= WANTED; ++i) put(&w.record[i], said[i]);
    st_release(&w.record[SAID], 1);
    tell(w, c.epoch, code, culprit);
    put(&w.desk[FAILED], c.epoch);
  } else {
    while (look(&w.desk[FAILED]) == 0) {}
  }
  *c.bad = 1;
}

// Whether a peer has said something after which `word` cannot come, or must not count.
__device__ bool is_aborted(const Launch& c, const i64* word, i64 want, i64 peer, i64 name) {
  const Words& w = c.w;
  for (int p = 0; p < w.world; ++p) {
    if (p == w.rank) continue;
    i64 said = ld_acquire(w.peers[p * PLACES + MY_ABORT]);
    if (said == 0) continue;
    i64 what = said / RANKS, its = what / CODES, code = what % CODES;
    bool lost = code != REFUSED && its <= c.epoch;
    bool refused = code == REFUSED && its == c.epoch;
    bool left = its > c.epoch && p == peer;  // and so will not set what it has not set by now
    if (!(lost || refused || left)) continue;
    if (!lost && ld_acquire(word) >= want) continue;
    bool earlier = code != REFUSED && its < c.epoch;
    fail(c, ABORTED, p, name, said, want, earlier ? POISONED : FAILED_CALL,
         code == REFUSED ? p : said % RANKS);
    return true;
  }
  return false;
}

__device__ bool await(const Launch& c, const i64* word, i64 want, i64 peer, i64 name) {
  const Words& w = c.w;
  for (unsigned spin = 0;; ++spin) {
    i64 seen = ld_acquire(word);
    if (seen >= want) return true;
    if (spin % 16 != 15) continue;
    if (look(&w.desk[FAILED]) != 0) {
      *c.bad = 1;
      return false;
    }
    if (is_aborted(c, word, want, peer, name)) return false;
    if (look(&w.desk[STOP]) != 0) {  // said by the host; the peers must hear of it like of the rest
      fail(c, STOPPED, w.rank, name, seen, want, FAILED_CALL, w.rank);
      return false;
    }
    if (now_ns() - (c.started ? c.started : look(&w.desk[STARTED])) > look(&w.desk[LIMIT])) {
      fail(c, TIMEOUT, peer, name, seen, want, FAILED_CALL, peer);
      return false;
    }
  }
}

// The epoch is taken only where no call is on its way: two at once would use each other's number.
__device__ void begin(const Launch& c) {
  const Words& w = c.w;
  i64 done = c.epoch - 1;
  if (look(&w.desk[STOP]) != 0) {
    fail(c, STOPPED, w.rank, 0, 0, 0, FAILED_CALL, w.rank);
    return;
  }
  put(&w.desk[STARTED], c.started);
  i64 before = atomicCAS((u64*)&w.desk[EPOCH], (u64)done, (u64)c.epoch);
  if (before != done)
    fail(c, OVERLAP, w.rank, 0, before, done, FAILED_CALL, w.rank);
  else if (w.slots > 1 && c.epoch % w.slots != w.slot)
    fail(c, SLOT, w.rank, 0, w.slot, c.epoch % w.slots, FAILED_CALL, w.rank);
}

__device__ void enter(const Launch& c, int p) {
  i64* const* at = c.w.peers + p * PLACES;
  i64* record = at[ITS_RECORD] + c.epoch % 2 * RECORD_WORDS;
  put(&record[0], c.epoch);
  put(&record[1], c.w.rows);
  put(&record[2], c.w.fingerprint);
  st_release(at[ITS_ENTER], c.epoch);
}

// What is left to find out when all has been read: whether the peer was in the same call, and whether
// it has failed, in whatever call. In a *later* one, it may have multiplied into its own slot all the
// same (a library's product cannot be guarded) while this rank was still reading there: its word was
// set before, and the kernels that read have ended, so whoever has read a torn slot finds it here.
__device__ void check(const Launch& c, int p) {
  const Words& w = c.w;
  i64* const* at = w.peers + p * PLACES;
  const i64* record = at[MY_RECORD] + c.epoch % 2 * RECORD_WORDS;
  i64 entered = look(at[MY_ENTER]), said = look(at[MY_ABORT]);
  i64 its = look(&record[0]), rows = look(&record[1]), print = look(&record[2]);
  if (entered < c.epoch) {  // a schedule that awaits nothing of this peer
    if (!await(c, at[MY_ENTER], c.epoch, p, NAME_ENTER)) return;
    its = look(&record[0]), rows = look(&record[1]), print = look(&record[2]);
  }
  i64 code = said / RANKS % CODES, when = said / RANKS / CODES;
  if (code == FAILED_CALL || code == POISONED)
    fail(c, ABORTED, p, 0, said, c.epoch, when < c.epoch ? POISONED : FAILED_CALL, said % RANKS);
  else if (its != c.epoch)
    fail(c, GONE, p, NAME_RECORD, its, c.epoch, FAILED_CALL, p);
  else if (print != w.fingerprint)
    fail(c, ARGUMENTS, p, NAME_RECORD, print, w.fingerprint, FAILED_CALL, p);
  else if ((w.flags & SAME_ROWS) && rows != w.rows)
    fail(c, ROWS, p, NAME_RECORD, rows, w.rows, FAILED_CALL, p);
}

__device__ void poison(const Words& w) {
  for (i64 i = threadIdx.x; i < w.fill_rows * w.fill_cols; i += blockDim.x) {
    char* at = w.fill + i / w.fill_cols * w.row_pitch + i % w.fill_cols * w.col_pitch;
    if (w.itemsize == 2) *(unsigned short*)at = 0xffff;
    else *(unsigned*)at = 0xffffffffu;
  }
}

// One CTA of 64 threads or more. In this order: enter a call, set words, wait for words, leave the
// call. Every load costs most of a microsecond, one behind the other: so there is a thread for each
// word, waits begin at the other half of the block than sets, and peers at the second thread.
extern "C" __global__ void gl_words(const __grid_constant__ Words w) {
  __shared__ int bad;
  const int me = threadIdx.x, all = blockDim.x;
  const i64 done = look(&w.desk[COMPLETED]), current = look(&w.desk[EPOCH]);
  const i64 failed = look(&w.desk[FAILED]);
  const bool enters = w.flags & ENTERS, leaves = w.flags & LEAVES, refuses = w.flags & REFUSES;
  const Launch c = {w, &bad, enters ? done + 1 : current, enters ? now_ns() : 0};
  if (me == 0) bad = failed != 0;
  __syncthreads();
  if (enters) {
    if (!failed && me == 0) begin(c);
    // The record of two calls ago will be overwritten: the peer may still have to read it.
    for (int p = me - 1; !failed && p < w.world; p += all)
      if (p >= 0 && p != w.rank)
        await(c, w.peers[p * PLACES + MY_ENTER], c.epoch - 1, p, NAME_ENTER);
    __syncthreads();
    for (int p = me - 1; !*c.bad && p < w.world; p += all)
      if (p >= 0 && p != w.rank) enter(c, p);
  }
  if (!*c.bad) {
    if (refuses && me == 0) tell(w, c.epoch, REFUSED, w.rank);
    // A release publishes what the kernels before this one have stored, too.
    for (int i = me; i < w.nsets; i += all)
      st_release((i64*)w.sets[2 * i], c.epoch - w.sets[2 * i + 1]);
    for (int i = (me + all / 2) % all; i < w.nwaits; i += all) {
      const i64* wait = w.waits + 4 * i;
      if (!await(c, (const i64*)wait[0], c.epoch - wait[1], wait[2], wait[3])) break;
    }
  }
  if (!leaves) return;
  __syncthreads();
  for (int p = me - 1; !refuses && !*c.bad && p < w.world; p += all)
    if (p >= 0 && p != w.rank) check(c, p);
  __syncthreads();
  if (*c.bad) poison(w);
  else if (me == 0) put(&w.desk[COMPLETED], c.epoch);
}

struct Item {
  const char* from;
  i64 pitch, row_bytes, rows;  // of the source; at its destinations rows lie packed
  int first, fan, unit, spare;
};

const int ITEMS = 16, PLACES_TO = 64;

struct Moves {
  const i64* desk;
  Item items[ITEMS];
  char* to[PLACES_TO];
};

template <typename T>
__device__ void spread(const Moves& m, const Item& item) {
  const i64 in_row = item.row_bytes / sizeof(T), total = in_row * item.rows;
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += 4 * step) {
    T values[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      i64 at = i + u * step;
      if (at < total) {
        i64 place = item.rows == 1 ? at * (i64)sizeof(T)
                                   : at / in_row * item.pitch + at % in_row * (i64)sizeof(T);
        values[u] = *(const T*)(item.from + place);
      }
    }
    for (int d = 0; d < item.fan; ++d) {
      T* to = (T*)m.to[item.first + d];
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (i + u * step < total) to[i + u * step] = values[u];
    }
  }
  i64 done = item.rows == 1 ? in_row * (i64)sizeof(T) : item.row_bytes;  // what a unit leaves over
  if (blockIdx.x == 0)
    for (i64 i = done + threadIdx.x; i < item.row_bytes; i += blockDim.x)
      for (int d = 0; d < item.fan; ++d) m.to[item.first + d][i] = item.from[i];
}

// Each item is read once and stored to all its places; a row of blocks for each item.
extern "C" __global__ void gl_moves(const __grid_constant__ Moves m) {
  if (look(&m.desk[FAILED]) != 0) return;  // a failed call stores nothing more at any peer
  const Item& item = m.items[blockIdx.y];
  switch (item.unit) {
    case 16: spread<uint4>(m, item); break;
    case 8: spread<uint2>(m, item); break;
    case 4: spread<unsigned>(m, item); break;
    case 2: spread<unsigned short>(m, item); break;
    default: spread<unsigned char>(m, item);
  }
}

// threads.py explains how this works. It defines MOST_ARGUMENTS and, for that many arguments, the parameter list TYPES
// and the argument list VALUES (a[0], a[1], ...). Its ctypes structures mirror the ones here.
typedef unsigned long long word;
#if defined(__x86_64__)
#define PAUSE() __asm__ volatile("pause")
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() __asm__ volatile("")
#endif
enum { SERVE, RUN, CANCEL, SPIN = 20000, WAKES = 4, NAP = 200, CLOSED = -1 };
enum { NEW, LEADS, ALONE, DONE };
struct job {
  word kernel, slot, items, helpers, arguments[MOST_ARGUMENTS];
  word next;  // the first item that nobody has taken
  word state; // LEADS: the caller has the team; ALONE: another one has, or no helpers are wanted
};
struct team {
  struct job job;
  long inside; // how many workers do the job; CLOSED: it cannot be joined
  long taken;  // 1: a caller has the team
  long workers, asleep;
  long stopped; // 1: workers are to end
  int (*yield)(void), (*clock)(int, long *), (*nap)(unsigned), (*post)(void *);
  int (*wait)(void *);
  void *bell;        // the semaphore on which workers sleep; 0: there is none
  word semaphore[8]; // where it may be
};

static int call(struct team *t, struct job *job, int what);
static int serve(struct team *t);
static int take(struct job *job, const struct team *clock);
static void finish(struct team *t);
static void wake(struct team *t);

int team(struct team *t, struct job *job, int what) { return what == SERVE ? serve(t) : call(t, job, what); }

static void copy(word *to, const word *from, int count) {
  for (int i = 0; i < count; i++) {
    to[i] = from[i];
    __asm__ volatile(""); // else clang calls memcpy, which may be loaded further away than a call reaches
  }
}

// 0: the job is done or cancelled, no worker is inside any more, and none can join. 1: RUN is to be called again, once
// the interpreter has seen to signals.
static int call(struct team *t, struct job *job, int what) {
  if (job->state == DONE || (job->state == NEW && what == CANCEL)) return 0;
  if (job->state == NEW) {
    job->state = job->helpers && !__atomic_exchange_n(&t->taken, 1, __ATOMIC_ACQUIRE) ? LEADS : ALONE;
    if (job->state == LEADS) {
      copy((word *)&t->job, (const word *)job, sizeof t->job / sizeof(word));
      __atomic_store_n(&t->inside, 0, __ATOMIC_RELEASE);
      wake(t);
    }
  }
  struct job *mine = job->state == LEADS ? &t->job : job;
  if (what == CANCEL) __atomic_store_n(&mine->next, mine->items, __ATOMIC_RELAXED);
  if (!take(mine, t)) return 1;
  if (job->state == LEADS) finish(t);
  job->state = DONE;
  return 0;
}

static int serve(struct team *t) {
  while (!__atomic_load_n(&t->stopped, __ATOMIC_RELAXED)) {
    for (int spin = 0; spin < SPIN; spin++) {
      long inside = __atomic_load_n(&t->inside, __ATOMIC_ACQUIRE);
      if (inside != CLOSED && inside < (long)t->job.helpers &&
          __atomic_load_n(&t->job.next, __ATOMIC_RELAXED) < t->job.items &&
          __atomic_compare_exchange_n(&t->inside, &inside, inside + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        // Only now can the job not become another one, with fewer helpers than were counted above.
        if (inside < (long)t->job.helpers) take(&t->job, 0);
        __atomic_fetch_sub(&t->inside, 1, __ATOMIC_RELEASE);
        spin = 0;
      }
      PAUSE();
    }
    if (!t->bell) {
      t->nap(NAP); // microseconds
      continue;
    }
    __atomic_fetch_add(&t->asleep, 1, __ATOMIC_RELAXED);
    while (t->wait(t->bell)) PAUSE(); // a signal ends it too
    wake(t);
  }
  return 0;
}

// Wakes some of the workers that the job lacks; these wake others.
static void wake(struct team *t) {
  for (int i = 0; i < WAKES; i++) {
    long asleep = __atomic_load_n(&t->asleep, __ATOMIC_RELAXED);
    if (asleep <= 0 || t->workers - asleep >= (long)t->job.helpers ||
        __atomic_load_n(&t->job.next, __ATOMIC_RELAXED) >= t->job.items)
      return;
    if (__atomic_compare_exchange_n(&t->asleep, &asleep, asleep - 1, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      t->post(t->bell);
  }
}

static int close(struct team *t) {
  long nobody = 0;
  return __atomic_compare_exchange_n(&t->inside, &nobody, CLOSED, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void finish(struct team *t) {
  for (int spin = 0; !close(t); spin += spin < SPIN) {
    if (spin < SPIN) PAUSE();
    else t->yield(); // a worker has lost its core, perhaps to us
  }
  __atomic_store_n(&t->taken, 0, __ATOMIC_RELEASE);
}

static long tenths(const struct team *t) {
  long at[2]; // seconds, nanoseconds
  t->clock(0, at);
  return 10 * at[0] + at[1] / 100000000;
}

// 1: all items are taken. 0, only with a clock: a tenth of a second has ended.
static int take(struct job *job, const struct team *clock) {
  word a[MOST_ARGUMENTS];
  copy(a, job->arguments, MOST_ARGUMENTS);
  long begun = clock ? tenths(clock) : 0;
  for (word item; (item = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->items;) {
    a[job->slot] = item;
    ((void (*)(TYPES))job->kernel)(VALUES);
    if (clock && tenths(clock) != begun) return 0;
  }
  return 1;
}

/* A team of threads for one compiled library, which includes this once. Threads that wait give way to other processes. */

#ifndef VERL_TEAM_H
#define VERL_TEAM_H

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

struct team {
    void (*job)(struct team *, int thread);
    void *argument;
    int size;
    atomic_int arrived, phase, next; /* next: of tasks that are handed out one by one */
};

/* One pool, used by one caller at a time. A thread may still be leaving the last barrier of a job when its caller has returned,
   so the team outlives the job. */
static struct {
    pthread_mutex_t use, lock;
    pthread_cond_t work;
    struct team team;
    unsigned round; /* jobs so far */
    int threads;    /* that wait for work, numbered from 1 */
    int forks_seen;
} pool = {.use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

/* A waiting thread spins for some microseconds, which a barrier between even shares of work takes, and then yields its core,
   perhaps to the thread that it waits for. */
static void wait_until(atomic_int *value, int other_than)
{
    for (int i = 0; atomic_load_explicit(value, memory_order_acquire) == other_than; i++)
        if (i < 200)
            _mm_pause();
        else
            sched_yield();
}

static void barrier(struct team *team)
{
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == team->size) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
    } else
        wait_until(&team->phase, phase);
}

static void take_part(struct team *team, int thread)
{
    unsigned control = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* round to nearest, numbers below the normal ones are zero: the same in every thread */
    team->job(team, thread);
    _mm_setcsr(control);
}

static void *worker(void *argument)
{
    const int number = (int)(intptr_t)argument;
    pthread_mutex_lock(&pool.lock);
    unsigned seen = pool.round - 1; /* a thread is started under the lock, for the job that is then given out */
    for (;;) {
        while (pool.round == seen)
            pthread_cond_wait(&pool.work, &pool.lock);
        seen = pool.round;
        if (number >= pool.team.size)
            continue;
        pthread_mutex_unlock(&pool.lock);
        take_part(&pool.team, number);
        barrier(&pool.team);
        pthread_mutex_lock(&pool.lock);
    }
    return 0;
}

/* A child has none of the threads, and locks as they were at the fork. */
static void after_fork(void)
{
    pthread_mutex_init(&pool.use, 0);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.work, 0);
    pool.threads = 0;
    atomic_store(&pool.team.arrived, 0);
    atomic_store(&pool.team.next, 0);
}

/* Start threads until there are `wanted`. Fewer give the same results. */
static void grow_pool(int64_t wanted)
{
    if (!pool.forks_seen)
        pool.forks_seen = pthread_atfork(0, 0, after_fork) == 0;
    while (pool.forks_seen && pool.threads < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(intptr_t)(pool.threads + 1)))
            break;
        pthread_detach(thread);
        pool.threads++;
    }
}

static void run_team(void (*job)(struct team *, int), void *argument, int64_t size)
{
    pthread_mutex_lock(&pool.use);
    pthread_mutex_lock(&pool.lock);
    grow_pool(size - 1);
    pool.team.job = job;
    pool.team.argument = argument;
    pool.team.size = size < pool.threads + 1 ? (int)size : pool.threads + 1;
    pool.round++;
    if (pool.team.size > 1)
        pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    take_part(&pool.team, 0);
    barrier(&pool.team);
    pthread_mutex_unlock(&pool.use);
}

#endif

/* Sharing the work of a custom call with XLA's own threads: none are added, so nothing competes for the cores. */

#include "shared.h"
#include "vectors.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static gemm_fn gemms[NUM_KERNELS][2];

#if defined(LANES)
void panax_gemm_f32(int, int, int, int, int, int, float, const void *, int, const void *, int, float, float *, int);
void panax_gemm_bf16(int, int, int, int, int, int, float, const void *, int, const void *, int, float, float *, int);

__attribute__((constructor)) static void use_own(void) {
  gemms[OWN][0] = panax_gemm_f32;
  gemms[OWN][1] = panax_gemm_bf16;
}
#endif

void panax_use_library(void *gemm_f32, void *gemm_bf16) {
  gemms[INTEL][0] = (gemm_fn)gemm_f32;
  gemms[INTEL][1] = (gemm_fn)gemm_bf16;
}

int panax_has(int kernel, int bf16) { return gemms[kernel][bf16] != NULL; }

gemm_fn gemm_of(int kernel, int bf16) { return kernel >= 0 && kernel < NUM_KERNELS ? gemms[kernel][bf16] : NULL; }

XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {0};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

int only_asked(XLA_FFI_CallFrame *frame) {
  /* The type that every extension begins with has another name from jax 0.12 on; this one has the same. */
  const XLA_FFI_Metadata_Extension *extension = (const XLA_FFI_Metadata_Extension *)frame->extension_start;
  if (extension && extension->extension_base.type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = extension->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 1;
  }
  return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}

static void *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t i = 0; i < frame->attrs.size; i++) {
    const XLA_FFI_ByteSpan *found = frame->attrs.names[i];
    if (found->len == strlen(name) && !memcmp(found->ptr, name, found->len))
      return frame->attrs.attrs[i];
  }
  abort(); /* The Python beside this file names all of them. */
}

static const void *scalar_attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  return ((const XLA_FFI_Scalar *)attribute(frame, name))->value;
}

int int_attribute(const XLA_FFI_CallFrame *frame, const char *name) { return *(const int32_t *)scalar_attribute(frame, name); }

float float_attribute(const XLA_FFI_CallFrame *frame, const char *name) { return *(const float *)scalar_attribute(frame, name); }

const int32_t *ints_attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  return ((const XLA_FFI_Array *)attribute(frame, name))->data;
}

static pthread_key_t memories[NUM_MEMORIES];

static void make_keys(void) {
  for (int i = 0; i < NUM_MEMORIES; i++)
    if (pthread_key_create(&memories[i], free)) abort();
}

void *thread_memory(int kind, size_t size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static _Thread_local struct {
    void *start;
    size_t size;
  } held[NUM_MEMORIES];
  if (size > held[kind].size) {
    pthread_once(&once, make_keys);
    free(held[kind].start);
    held[kind].start = aligned_alloc(64, (size + 63) / 64 * 64);
    /* As where XLA itself finds no memory on the host: there is no error to return. */
    if (!held[kind].start || pthread_setspecific(memories[kind], held[kind].start)) abort();
    held[kind].size = size;
  }
  return held[kind].start;
}

struct shared {
  void (*run)(const void *work, int piece);
  const void *work;
  int pieces;
  atomic_int next, done, holders;
  pthread_mutex_t lock;
  pthread_cond_t all_done;
};

/* Whoever comes takes the next piece, until there is none. `work` is the caller's, who waits for each piece that was taken. */
static void take(struct shared *shared) {
  int mine = 0;
  for (int piece; (piece = atomic_fetch_add(&shared->next, 1)) < shared->pieces; mine++) shared->run(shared->work, piece);
  if (mine && atomic_fetch_add(&shared->done, mine) + mine == shared->pieces) {
    pthread_mutex_lock(&shared->lock);
    pthread_cond_signal(&shared->all_done);
    pthread_mutex_unlock(&shared->lock);
  }
}

static void let_go(struct shared *shared) {
  if (atomic_fetch_sub(&shared->holders, 1) > 1) return;
  pthread_cond_destroy(&shared->all_done);
  pthread_mutex_destroy(&shared->lock);
  free(shared);
}

/* A thread of the pool that comes too late finds no piece left. */
static void help(void *shared) {
  take(shared);
  let_go(shared);
}

static int failed(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {0};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  frame->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

int threads_of(const XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {0};
  args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  args.ctx = frame->ctx;
  args.num_threads = &threads;
  return failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? 1 : (int)threads;
}

void share_out(const XLA_FFI_CallFrame *frame, int pieces, void (*run)(const void *work, int piece), const void *work) {
  const int threads = threads_of(frame), helpers = (threads < pieces ? threads : pieces) - 1;
  struct shared *shared = helpers > 0 ? malloc(sizeof *shared) : NULL;
  if (!shared) {
    for (int piece = 0; piece < pieces; piece++) run(work, piece);
    return;
  }
  *shared = (struct shared){.run = run, .work = work, .pieces = pieces};
  atomic_init(&shared->holders, 1 + helpers);
  pthread_mutex_init(&shared->lock, NULL);
  pthread_cond_init(&shared->all_done, NULL);
  for (int i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {0};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = frame->ctx;
    args.task = help;
    args.data = shared;
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) let_go(shared);
  }
  take(shared);
  pthread_mutex_lock(&shared->lock);
  while (atomic_load(&shared->done) < pieces) pthread_cond_wait(&shared->all_done, &shared->lock);
  pthread_mutex_unlock(&shared->lock);
  let_go(shared);
}

/* A stop inside of a compiled step, for the fault matrix: a custom call that gives back what it is given, and at one of its calls does
   what `hold_at` said. It does not hold Python's lock. */

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "xla/ffi/api/c_api.h"

enum { FORWARD, OPTIMIZER, PLACES };
enum { TELL, WAIT, FLIP, FAIL, EXHAUST, LOCK };
enum { LONGEST_SECONDS = 30 };

static struct {
  atomic_int calls;
  int at, action;
  char announce[1024], go[1024];
} places[PLACES];

/* Python's own, of the process that has loaded this. */
extern int PyGILState_Ensure(void) __attribute__((weak));

/* At the call of this number, from 1, say so and do `action`. */
void hold_at(int place, int at, int action, const char *announce, const char *go) {
  snprintf(places[place].announce, sizeof places[place].announce, "%s", announce);
  snprintf(places[place].go, sizeof places[place].go, "%s", go);
  places[place].action = action;
  places[place].at = at;
}

static void tell(const char *path) {
  char text[16];
  int length = snprintf(text, sizeof text, "%d", (int)getpid());
  int file = open(path, O_CREAT | O_WRONLY, 0600);
  if (file < 0 || write(file, text, length) != length) _exit(99);
  close(file);
}

static XLA_FFI_Error *refuse(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args error = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message, .errc = code};
  return frame->api->XLA_FFI_Error_Create(&error);
}

static XLA_FFI_Error *held(XLA_FFI_CallFrame *frame, int place) {
  const XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return 0;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return 0;
  const XLA_FFI_Buffer *given = frame->args.args[0], *gives = frame->rets.rets[0];
  size_t bytes = sizeof(float);
  for (int64_t i = 0; i < given->rank; i++) bytes *= given->dims[i];
  memcpy(gives->data, given->data, bytes);
  if (atomic_fetch_add(&places[place].calls, 1) + 1 != places[place].at) return 0;
  tell(places[place].announce);
  struct stat there;
  switch (places[place].action) {
    case WAIT:
      for (int i = 0; i < LONGEST_SECONDS * 100 && stat(places[place].go, &there); i++) usleep(10000);
      break;
    case FLIP:
      /* The sign of the first number: the recipe doubles an update where the norm of the gradients is negative. */
      *(uint32_t *)gives->data ^= 0x80000000u;
      break;
    case FAIL:
      return refuse(frame, XLA_FFI_Error_Code_INTERNAL, "injected");
    case EXHAUST:
      return refuse(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "Out of memory allocating 1125899906842624 bytes");
    case LOCK:
      PyGILState_Ensure();
      for (;;) pause();
  }
  return 0;
}

XLA_FFI_Error *panax_test_forward(XLA_FFI_CallFrame *frame) { return held(frame, FORWARD); }
XLA_FFI_Error *panax_test_optimizer(XLA_FFI_CallFrame *frame) { return held(frame, OPTIMIZER); }

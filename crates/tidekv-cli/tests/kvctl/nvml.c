// A driver's library with two GPUs that do not exist and one that is lost, for tests of what reads it.
//
//   GPU 0   exclusive, 140 GiB, 100 GiB free; users: the process of NVML_STUB_PID (30 GiB), and one that is not here
//   GPU 1   divided into one part, 18 GiB, 17 GiB free
//   GPU 2   fell off the bus
//
// NVML_STUB_INIT is what nvmlInit answers, NVML_STUB_DRIVER the driver's version. Only what we call is here; the numbers
// are those of nvml.h.
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { EXCLUSIVE_PROCESS = 3 };

typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } process;

static const u64 GIB = 1ull << 30;
static int whole, divided, part;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static int answer(char *place, u32 bytes, const char *text) {
    strncpy(place, text, bytes);
    return SUCCESS;
}

int nvmlInit_v2(void) { return atoi(setting("NVML_STUB_INIT", "0")); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *place, u32 bytes) {
    return answer(place, bytes, setting("NVML_STUB_DRIVER", "580.95.05"));
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, SUCCESS; }
int nvmlDeviceGetCount_v2(u32 *count) { return *count = 3, SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(u32 index, void **device) {
    if (index == 2) return GPU_IS_LOST;
    *device = index == 0 ? &whole : &divided;
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *place, u32 bytes) { return answer(place, bytes, "NVIDIA Stub"); }

int nvmlDeviceGetUUID(void *device, char *place, u32 bytes) {
    return answer(place, bytes, device == &whole ? "GPU-0000" : device == &divided ? "GPU-0001" : "MIG-0002");
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    memory->total = (device == &part ? 18 : 140) * GIB;
    memory->free = (device == &part ? 17 : 100) * GIB;
    memory->reserved = GIB / 2;
    memory->used = memory->total - memory->free - memory->reserved;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(void *device, u32 *mode) {
    return *mode = device == &whole ? EXCLUSIVE_PROCESS : 0, SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *device, u32 *on) { return *on = device == &whole, SUCCESS; }
int nvmlDeviceGetMigMode(void *device, u32 *now, u32 *next) { return *now = *next = device == &divided, SUCCESS; }
int nvmlDeviceGetMaxMigDeviceCount(void *device, u32 *count) { return *count = 7, SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, u32 index, void **handle) {
    return index == 0 ? (*handle = &part, SUCCESS) : NOT_FOUND;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, u32 *count, process *list) {
    u32 there = device == &whole ? 2 : 0, room = *count;
    *count = there;
    if (there == 0) return SUCCESS;
    if (room < there) return INSUFFICIENT_SIZE;
    list[0] = (process){(u32)atoi(setting("NVML_STUB_PID", "1")), 30 * GIB, ~0u, ~0u};
    list[1] = (process){4000000000u, ~0ull, ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, u32 *count, process *list) { return *count = 0, SUCCESS; }

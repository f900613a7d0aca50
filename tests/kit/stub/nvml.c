/* libnvidia-ml.so.1 that tells of one idle H200, so that vLLM takes this machine for a CUDA one.
 *
 * Only NVML is faked: what vLLM asks before it touches a GPU. A function that is missing here makes
 * pynvml answer "function not found", as an old driver does.
 */
#include <stdio.h>
#include <string.h>

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define GIB (1ull << 30)

typedef void *device;
static char the_gpu;

static int text(char *out, unsigned room, const char *answer) {
    snprintf(out, room, "%s", answer);
    return SUCCESS;
}
static int the_device(device *out) {
    *out = &the_gpu;
    return SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "stub of NVML"; }

int nvmlSystemGetDriverVersion(char *out, unsigned room) { return text(out, room, "580.0"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) { return the_device(out); }
int nvmlDeviceGetHandleByUUID(const char *uuid, device *out) { return the_device(out); }
int nvmlDeviceGetIndex(device gpu, unsigned *index) {
    *index = 0;
    return SUCCESS;
}
int nvmlDeviceGetName(device gpu, char *out, unsigned room) {
    return text(out, room, "NVIDIA H200");
}
int nvmlDeviceGetUUID(device gpu, char *out, unsigned room) {
    return text(out, room, "GPU-00000000-0000-0000-0000-000000000000");
}
int nvmlDeviceGetCudaComputeCapability(device gpu, int *major, int *minor) {
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};
int nvmlDeviceGetMemoryInfo(device gpu, struct memory *out) {
    *out = (struct memory){.total = 141 * GIB, .free = 139 * GIB, .used = 2 * GIB};
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(device gpu, void *out) { return NOT_SUPPORTED; }

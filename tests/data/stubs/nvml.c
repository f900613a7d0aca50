/* NVML of two cards, for pynvml to load: the first answers, the second is lost (15).
   Returns: 0 success, 3 not supported, 4 no permission, 7 insufficient size. */
#include <string.h>
typedef char *D;
static char first, lost;
#define OF(d) if (d == &lost) return 15
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int e) { return "stub"; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.65.06", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, D *d) { *d = i ? &lost : &first; return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, D *d) { *d = &first; return 0; }
int nvmlDeviceGetUUID(D d, char *s, unsigned n) {
  strncpy(s, d == &lost ? "GPU-c0ffee00-0000-1111-2222-333344445555"
                        : "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", n);
  return 0;
}
int nvmlDeviceGetName(D d, char *s, unsigned n) { OF(d); strncpy(s, "NVIDIA H200", n); return 0; }
typedef struct { char legacy[16]; unsigned a, b, c, d, e; char bus[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(D d, Pci *p) { OF(d); strcpy(p->bus, "00000000:3B:00.0"); return 0; }
int nvmlDeviceGetCudaComputeCapability(D d, int *a, int *b) { OF(d); *a = 9; *b = 0; return 0; }
int nvmlDeviceGetMigMode(D d, unsigned *a, unsigned *b) { OF(d); *a = *b = 0; return 0; }
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(D d, Memory *m) {
  OF(d); m->total = 143771ull << 20; m->free = 143171ull << 20; m->used = 600ull << 20; return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(D d, unsigned *v) { OF(d); *v = 5; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(D d, unsigned *v) { OF(d); *v = 5; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(D d, unsigned *v) { OF(d); *v = 16; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(D d, unsigned *v) { OF(d); *v = 16; return 0; }
int nvmlDeviceGetClockInfo(D d, unsigned k, unsigned *v) { OF(d); *v = k == 1 ? 345 : 3201; return 0; }
int nvmlDeviceGetMaxClockInfo(D d, unsigned k, unsigned *v) {
  OF(d); *v = k == 1 ? 1980 : 3201; return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(D d, unsigned long long *v) { OF(d); *v = 1; return 0; }
typedef struct { unsigned version, sensor; int celsius; } Temperature;
int nvmlDeviceGetTemperatureV(D d, Temperature *t) { OF(d); t->celsius = 31; return 0; }
int nvmlDeviceGetPowerUsage(D d, unsigned *v) { OF(d); *v = 76543; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(D d, unsigned *v) { OF(d); *v = 700000; return 0; }
int nvmlDeviceGetEccMode(D d, unsigned *a, unsigned *b) { OF(d); *a = *b = 1; return 0; }
int nvmlDeviceGetPersistenceMode(D d, unsigned *v) { OF(d); *v = 1; return 0; }
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(D d, unsigned *n, Process *p) {
  OF(d);
  if (!p) { *n = 1; return 7; }
  *n = 1; p->pid = 1; p->used = ~0ull; return 0;
}

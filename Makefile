# quartet.c: `make` builds the trainer for the CPU, and for the GPU where nvcc is found.
#   make                 train_gpt_nvfp4_cpu, and train_gpt_nvfp4 where CUDA is found
#   make test            every CPU test;     make test SANITIZE=1   the same under AddressSanitizer and UBSan
#   make test-layout     where the GPU program's parts lie in memory (needs nvcc, no card)
#   make test-gpu        every GPU test;     make bench-gpu         the speed table (both need a card)
#   make quantizer-table error and bias of every quantizer on N(0,1);   make bench-cpu   speed of the CPU program
#   make concentration   error of the mean gradient of a layer over 1 to 1024 draws, for every recipe
#   make probe           look for compilers and libraries again (also after moving CUDA_HOME, CJSON_HOME, ...)
# build/config.mk holds what scripts/probe.sh found; every variable can be set on the command line.

MK := build/config.mk
ifeq ($(filter clean probe,$(MAKECMDGOALS)),)
-include $(MK)
endif

comma   := ,
WARN    := -Wall -Wextra
# No contraction into fused multiply-adds: the numerics state every rounding. No errno, no traps: loops may vectorize.
CFLAGS  ?= -O3 -g
STRICT  := -std=c11 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -fno-trapping-math
ifdef SANITIZE
B       := build/sanitize
SAN     := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
CFLAGS  := -O1 -g
else
B       := build
endif
REVISION := $(shell git rev-parse --short HEAD 2>/dev/null)
CPU_CC   = $(CC) $(STRICT) $(CFLAGS) $(NATIVE) $(OPENMP) $(WARN) $(SAN) -I. $(if $(REVISION),-DGIT_REVISION=\"$(REVISION)\")
# The trainers alone start as several processes; tests of parts need neither MPI nor NCCL.
CPU_LIBS = $(OPENBLAS_FLAGS) $(CJSON_FLAGS) -lm
NVCCFLAGS = -std=c++17 -O3 -lineinfo $(GENCODES) -Xcompiler "-ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -Wall -Wno-unused-function" -I. \
            $(if $(REVISION),-DGIT_REVISION=\"$(REVISION)\")
GPU_LIBS = -lcublasLt -lcublas $(CUDNN_FLAGS) $(subst -Wl$(comma)-rpath$(comma),-Xlinker=-rpath=,$(CJSON_FLAGS))

HEADERS  := $(wildcard llmc/*.h llmc/cpu/*.h dev/test/*.h dev/bench/*.h dev/fuzz/*.[ch])
CUHEADERS := $(HEADERS) $(wildcard llmc/cuda/*.cuh dev/cuda/*.cuh)
TESTS    := $(patsubst dev/test/%.c,$(B)/%,$(wildcard dev/test/test_*.c))
LADDERS  := $(patsubst dev/cuda/%.cu,build/cuda/%,$(wildcard dev/cuda/*.cu))

.PHONY: all all-cpu-tests cpu gpu test test-build test-layout test-gpu test-transformers bench-gpu bench-cpu quantizer-table concentration ladders cuda-compile probe clean
all: cpu $(if $(NVCC),gpu)
cpu: train_gpt_nvfp4_cpu
gpu: train_gpt_nvfp4

$(MK):
	@CC="$(CC)" scripts/probe.sh $@
probe:
	@CC="$(CC)" scripts/probe.sh $(MK)

train_gpt_nvfp4_cpu: train_gpt_nvfp4.cu $(HEADERS) $(MK)
	$(CPU_CC) -x c $< -x none -o $@ $(CPU_LIBS) $(MPI_FLAGS)
$(B)/train_gpt_nvfp4_cpu: train_gpt_nvfp4.cu $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) -x c $< -x none -o $@ $(CPU_LIBS) $(MPI_FLAGS)
$(B)/test_gpt2_cpu: test_gpt2.cu $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) -x c $< -x none -o $@ $(CPU_LIBS)
$(B)/dump_logits_cpu: dev/test/dump_logits.cu $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) -x c $< -x none -o $@ $(CPU_LIBS)
$(B)/test_%: dev/test/test_%.c $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) $< -o $@ $(CMOCKA_FLAGS) $(CPU_LIBS)
# Where CUDA is found, this one compares with the toolkit's own conversions; elsewhere with a second definition of ours (it says which).
$(B)/test_convert: dev/test/test_convert.c $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) $(CUDA_HEADERS) $< -o $@ $(CMOCKA_FLAGS) $(CPU_LIBS)
$(B)/%: dev/bench/%.c $(HEADERS) $(MK)
	@mkdir -p $(B)
	$(CPU_CC) $< -o $@ $(CPU_LIBS)

train_gpt_nvfp4: train_gpt_nvfp4.cu $(CUHEADERS) $(MK)
	@test -n "$(NVCC)" || { echo "error: no nvcc was found; set CUDA_HOME and run 'make probe'"; exit 1; }
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS) $(NCCL_FLAGS) $(MPI_NVCC_FLAGS)
build/test_gpt2: test_gpt2.cu $(CUHEADERS) $(MK)
	@mkdir -p build
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS)
build/dump_logits: dev/test/dump_logits.cu $(CUHEADERS) $(MK)
	@mkdir -p build
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS)
build/cuda/%: dev/cuda/%.cu $(CUHEADERS) $(MK)
	@mkdir -p build/cuda
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS)
build/%_gpu: dev/test/%_gpu.cu $(CUHEADERS) $(MK)
	@mkdir -p build
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS)
# Needs nvcc and no card: no_card.c answers for it, in place of the shared runtime's functions. The machine code is not run.
build/test_memory_layout: dev/test/test_memory_layout.cu dev/test/no_card.c $(CUHEADERS) $(MK)
	@mkdir -p build
	"$(NVCC)" $(subst $(GENCODES),-gencode arch=compute_90a$(comma)code=sm_90a,$(subst -O3,-O1,$(NVCCFLAGS))) -cudart shared $< dev/test/no_card.c -o $@ $(GPU_LIBS)
build/bench_gpu: dev/bench/bench_gpu.cu $(CUHEADERS) $(MK)
	@mkdir -p build
	"$(NVCC)" $(NVCCFLAGS) $< -o $@ $(GPU_LIBS)

# What the tests run: every cmocka program, the whole-model test, and the trainer itself.
test-build: $(TESTS) $(B)/test_gpt2_cpu $(B)/train_gpt_nvfp4_cpu
all-cpu-tests: test-build
test: test-build
	@dev/test/run.sh $(B)
quantizer-table: $(B)/quantizer_table
	@$<
concentration: $(B)/concentration
	@$<
bench-cpu: $(B)/bench_quantize $(B)/bench_cpu
	@export OMP_WAIT_POLICY=passive; $(B)/bench_quantize && $(B)/bench_cpu
ladders: $(LADDERS)
# Compiles the CUDA sources that exist, for each architecture; links nothing and runs nothing.
cuda-compile: $(MK)
	@dev/test/cuda_compile.sh "$(NVCC)" "$(CUDNN_FLAGS)" "$(CJSON_FLAGS)" "$(NCCL_FLAGS) $(MPI_FLAGS)"
test-layout: build/test_memory_layout
	@$<
test-gpu:
	@dev/test/gpu.sh
# Logits of the CPU program's checkpoints against Hugging Face transformers, every recipe (PYTHON: an interpreter that has it).
test-transformers:
	@dev/test/transformers_gpu.sh --cpu
bench-gpu: build/bench_gpu
	@$<

clean:
	rm -rf build train_gpt_nvfp4 train_gpt_nvfp4_cpu

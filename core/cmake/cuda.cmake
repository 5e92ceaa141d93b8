# SPDX-License-Identifier: Apache-2.0
# Turns CUDA on for the core where it is wanted and nvcc is found. Included after project(); reads
#   SOK_WITH_CUDA             ON: fail without nvcc; OFF: leave CUDA out; unset: as found
#   CMAKE_CUDA_ARCHITECTURES  see SOK_CUDA_ARCHS in docs/ENVVARS.md; tools/build.py sets it
# and gives sok_enable_cuda(target), which adds the sources of src/cuda and src/nccl and the static CUDA runtime.

if(NOT DEFINED SOK_WITH_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(SOK_WITH_CUDA ON)
  else()
    set(SOK_WITH_CUDA OFF)
  endif()
endif()

if(SOK_WITH_CUDA)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)
  endif()
  enable_language(CUDA)
endif()

function(sok_enable_cuda target)
  if(NOT SOK_WITH_CUDA)
    return()
  endif()
  file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*.cu" "${PROJECT_SOURCE_DIR}/src/nccl/*.cc")
  target_sources(${target} PRIVATE ${cuda_sources})
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "-(real|virtual)$" "" OUTPUT_VARIABLE archs)
  list(JOIN archs " " archs)
  target_compile_definitions(${target} PRIVATE SOK_WITH_CUDA=1)
  set_source_files_properties(src/cuda/device.cu PROPERTIES COMPILE_DEFINITIONS "SOK_CUDA_ARCHS=\"${archs}\"")
  # Initial values are the same on every device: no fused multiply-adds.
  set_source_files_properties(src/cuda/initialize.cu src/cuda/read_rows.cu PROPERTIES COMPILE_OPTIONS "--fmad=false")
  # The language version as an option: CMake 3.25 does not know that nvcc has C++20.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--Werror=all-warnings;-lineinfo>")
  set_target_properties(${target} PROPERTIES
    CUDA_RUNTIME_LIBRARY Static  # frameworks bring runtimes of their own; ours stays private
    CUDA_SEPARABLE_COMPILATION OFF
    CUDA_VISIBILITY_PRESET hidden)
endfunction()

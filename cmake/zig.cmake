# Cross-compiles with zig's clang, libc++ and glibc stubs, for the processor that DATADIST_PROCESSOR names in the
# environment: x86_64 or aarch64. The environment, because CMake reads a toolchain file again for every probe.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{DATADIST_PROCESSOR}")
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|aarch64)$")
  message(FATAL_ERROR "DATADIST_PROCESSOR is '${CMAKE_SYSTEM_PROCESSOR}': must be x86_64 or aarch64")
endif()

# The oldest glibc that the wheels run with: that of the manylinux_2_28 tag (scripts/wheels.py).
set(CMAKE_C_COMPILER "$ENV{DATADIST_ZIG}" cc)
set(CMAKE_C_COMPILER_TARGET "${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28")
set(CMAKE_CXX_COMPILER "$ENV{DATADIST_ZIG}" c++)
set(CMAKE_CXX_COMPILER_TARGET "${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28")
# The system's archiver knows no objects of another processor.
set(CMAKE_CXX_ARCHIVE_CREATE "\"$ENV{DATADIST_ZIG}\" ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "\"$ENV{DATADIST_ZIG}\" ranlib <TARGET>")
# Probes compile only: for each program that one of them links, zig would first make a libc++ without optimisation.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)

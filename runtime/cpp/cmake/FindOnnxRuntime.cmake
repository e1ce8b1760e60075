# Finds ONNX Runtime: headers and library, wherever each comes from. Gives the target OnnxRuntime::OnnxRuntime.
#
#   OnnxRuntime_INCLUDE_DIR  folder of onnxruntime_cxx_api.h
#   OnnxRuntime_LIBRARY      libonnxruntime.so.VERSION, as in the folder onnxruntime/capi of the Python package
#
# The library may be newer than the headers, never older. CMAKE_PREFIX_PATH helps to find both.
find_path(OnnxRuntime_INCLUDE_DIR onnxruntime_cxx_api.h
  PATH_SUFFIXES onnxruntime onnxruntime/core/session DOC "folder of onnxruntime_cxx_api.h")
find_library(OnnxRuntime_LIBRARY onnxruntime DOC "ONNX Runtime's shared library")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OnnxRuntime REQUIRED_VARS OnnxRuntime_LIBRARY OnnxRuntime_INCLUDE_DIR)
if(OnnxRuntime_FOUND AND NOT TARGET OnnxRuntime::OnnxRuntime)
  add_library(OnnxRuntime::OnnxRuntime UNKNOWN IMPORTED)
  set_target_properties(OnnxRuntime::OnnxRuntime PROPERTIES
    IMPORTED_LOCATION "${OnnxRuntime_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${OnnxRuntime_INCLUDE_DIR}")
endif()
mark_as_advanced(OnnxRuntime_INCLUDE_DIR OnnxRuntime_LIBRARY)

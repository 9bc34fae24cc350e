"""Defines flexmod's errors, one class for each mistake.

A class has two sentences: `what` was wrong and what to write `instead`. Both are format strings; the code
that raises an error passes the facts by keyword. An error inside a user's mod also has `where`, the file and
line of the user's code. All three form the message, which tests compare word by word.

    raise HeadDimMismatch(query=64, key=128)

A class stands in the file for the thing that is wrong; `__all__` makes it public.
"""

from flexmod.errors.base import *
from flexmod.errors.calls import *
from flexmod.errors.kernels import *
from flexmod.errors.masks import *
from flexmod.errors.mods import *

__all__ = [
    "FlexmodError", "Where",
    # calls.py
    "NotFourDimensional", "LayoutError", "NotATensor", "EmptyHeadDim", "ExtentError", "NotStrided",
    "NestedTensorInput", "NestedLayoutError", "PackedShapeError", "MaskTwiceError", "DeviceMismatch", "NoDeviceError",
    "TensorKindError", "FreedStorageError", "OperationTensorError", "ScaleError", "ScaleValueError", "FakeTensorError", "UnsupportedDevice", "UnsupportedDtype", "MixedDtypes", "LowerPrecisionBackward", "QuantizeGradientError", "HeadDimMismatch",
    "OffsetTypeError", "OffsetValueError", "OffsetShapeError", "OffsetMismatchError",
    "Float8MixedError", "Float8HeadDimError", "Float8GradientError", "OutDtypeError", "ScalesTypeError",
    "ScalesUnusedError", "ScalesShapeError", "ScalesValueError",
    "LengthMismatch", "BatchMismatch", "KeyValueHeadsMismatch", "HeadCountMismatch", "HeadRatioError",
    "ReturnArgumentsError", "ArgumentTypeError", "ModifiedBeforeBackwardError", "RecomputedError", "SavedTensorError",
    "DoubleBackwardError", "ForwardModeError", "JitTraceError", "VmapError", "TransformersArgumentError",
    "TransformersModelError",
    # masks.py
    "NotABlockMask", "MaskBroadcastError", "MaskLengthError", "MaskReadsBroadcastIndex", "BlockSizeError",
    "BlockMaskPartsError", "LengthError", "MaskExtentError", "DenseMaskError", "BlockMaskIndexError", "BlockMaskCropError", "MaskModChangedError",
    "BlockMaskResizeError", "BlockMaskCombineError", "SlicedTorchMaskError", "InGraphModError",
    "ConstantError", "ForgottenGraphError", "GraphNumberError", "InGraphMaskError", "MissingMatplotlib", "GridSizeError",
    # mods.py
    "ModArityError", "NotCallable", "NotMadeError", "NoSignatureError", "MaskResultError", "ScoreResultError", "NotScalarError",
    "NoResultError", "ControlFlowError", "ConcreteValueError", "ReductionError", "RandomNumberError",
    "MutationError", "UnknownOperationError", "OperationArgumentError", "ForeignCaptureError", "IndexDtypeError",
    "CaptureIndexError", "CaptureBoundsError", "ModDtypeError", "MaskCaptureGradientError",
    "NoDerivativeError", "LibraryArgumentError", "NotPicklableError", "CallSizeError",
    # kernels.py
    "UnknownOption", "OptionValueError", "FlashBackendError", "DecodeBackendError", "BackendDeviceError",
    "TemplateError", "NoKernelsError", "NoTileFits", "RoundedProductsError", "MisaddressedProductsError",
    "NotCalledError", "NoPtxError", "NoStandaloneError", "FlexOnCpuError", "EnvironmentSwitchError",
    "InterpreterOperationError", "UnknownTarget", "NotAGpuError", "MissingPackage",
]  # fmt: skip

for _name in __all__:  # a traceback shows the name that users import
    globals()[_name].__module__ = __name__

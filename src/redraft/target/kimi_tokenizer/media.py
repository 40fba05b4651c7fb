"""The processor of images beside the small tokenizer, as far as a server asks for it: text alone goes through it."""

from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class SmallImages(BaseImageProcessor):
    """Holds `media_proc_cfg`; images are refused."""

    model_input_names = ["pixel_values", "grid_thws"]  # noqa: RUF012

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **given: Any) -> None:
        super().__init__(**given)
        self.media_proc_cfg = media_proc_cfg

    def preprocess(self, *_: Any, **__: Any) -> BatchFeature:
        raise NotImplementedError("The small target is asked with text alone.")


class SmallProcessor(ProcessorMixin):
    """A tokenizer, and images that are refused."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **given: Any) -> None:
        super().__init__(image_processor, tokenizer, **given)
        self.media_processor = image_processor

    def __call__(self, text: Any = None, medias: Any = None, **given: Any) -> BatchFeature:
        return self.tokenizer(text, **given)

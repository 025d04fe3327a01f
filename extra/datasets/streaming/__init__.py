from .checkpoint import load_checkpoint as load_checkpoint, save_checkpoint as save_checkpoint
from .collate import pack_batch as pack_batch, pad_batch as pad_batch
from .dataset import StreamingDataset as StreamingDataset
from .write import MDSWriter as MDSWriter, JSONWriter as JSONWriter, XSVWriter as XSVWriter, merge_index as merge_index
from .loader import StreamingDataLoader as StreamingDataLoader
from .mix import Stream as Stream
from .partition import World as World

from tests.storage.objects.conftest import obstore as obstore
from tests.storage.objects.conftest import plain_environment as plain_environment
